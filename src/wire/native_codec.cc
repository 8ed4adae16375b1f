#include "src/wire/native_codec.h"

#include <array>

#include <fmt/format.h>

#include "src/wire/binary.h"

namespace kvferry::wire {
namespace {

constexpr std::string_view kMagic = "KVFN";

template <std::size_t I = 0>
bool emplace_kind(std::size_t kind, Message& out) {
  if constexpr (I < std::variant_size_v<Message>) {
    if (kind == I) {
      out.emplace<I>();
      return true;
    }
    return emplace_kind<I + 1>(kind, out);
  } else {
    return false;
  }
}

template <class T>
void dump_value(std::string& out, const T& value);
template <class T>
void dump_value(std::string& out, const std::vector<T>& list);
template <class T>
void dump_value(std::string& out, const std::optional<T>& maybe);

template <class T>
void dump_value(std::string& out, const T& value) {
  if constexpr (std::is_enum_v<T>) {
    out += fmt::format("{}", static_cast<std::uint64_t>(value));
  } else if constexpr (std::is_integral_v<T>) {
    out += fmt::format("{}", value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    out += fmt::format("'{}'", value);
  } else {
    out += '{';
    const char* separator = "";
    describe(value, [&](const char* name, const auto& field) {
      out += fmt::format("{}{}=", separator, name);
      dump_value(out, field);
      separator = " ";
    });
    out += '}';
  }
}
template <class T>
void dump_value(std::string& out, const std::vector<T>& list) {
  out += fmt::format("[{}:", list.size());
  for (std::size_t i = 0; i < list.size() && i < 8; ++i) {
    out += ' ';
    dump_value(out, list[i]);
  }
  out += list.size() > 8 ? " ...]" : "]";
}
template <class T>
void dump_value(std::string& out, const std::optional<T>& maybe) {
  if (maybe) {
    dump_value(out, *maybe);
  } else {
    out += "none";
  }
}

}  // namespace

const char* name_of(const Message& message) {
  constexpr std::array<const char*, std::variant_size_v<Message>> kNames = {
      "Register", "Metadata", "StagingRequest", "StagingGrant", "ChunkReady", "Done",     "Abort",
      "AbortAck", "Ping",     "Pong",           "Unknown",      "AuxData",    "Watermark"};
  return kNames.at(message.index());
}

bool is_native(const Frames& frames) {
  return frames.size() == 1 && frames[0].starts_with(kMagic);
}

Frames encode_native(const NativeFrame& frame) {
  BinaryWriter writer;
  writer.put(frame.version);
  writer.put(static_cast<std::uint8_t>(frame.message.index()));
  writer.put(frame.session);
  writer.put(frame.reply);
  std::visit([&](const auto& message) { writer.put(message); }, frame.message);
  return {std::string(kMagic) + writer.take()};
}

Result<NativeFrame> decode_native(const Frames& frames) {
  const auto bad = [](std::string why) {
    return Status(Code::kProtocol, "native frame: " + std::move(why));
  };
  if (!is_native(frames)) return bad("no magic");
  const std::string_view bytes = std::string_view(frames[0]).substr(kMagic.size());
  NativeFrame frame;
  BinaryReader header(bytes, false);
  header.get(frame.version);
  if (!header.ok() || frame.version == 0) return bad("no version");
  BinaryReader reader(bytes.substr(sizeof frame.version), frame.version < kNativeVersion);
  std::uint8_t kind = 0;
  reader.get(kind);
  reader.get(frame.session);
  reader.get(frame.reply);
  if (!reader.ok()) return bad("cut short in the header");
  if (!emplace_kind(kind, frame.message)) return bad(fmt::format("kind {} is not known", kind));
  std::visit([&](auto& message) { reader.message(message); }, frame.message);
  if (!reader.ok())
    return bad(fmt::format("{} is cut short or has an impossible length", name_of(frame.message)));
  if (!reader.at_end() && frame.version <= kNativeVersion)
    return bad(fmt::format("{} has bytes to spare", name_of(frame.message)));
  return frame;
}

std::string dump(const NativeFrame& frame) {
  std::string out = fmt::format("{} v{} session={} from={} ", name_of(frame.message), frame.version,
                                frame.session.to_string(), frame.reply.host_port());
  std::visit([&](const auto& message) { dump_value(out, message); }, frame.message);
  return out;
}

}  // namespace kvferry::wire
