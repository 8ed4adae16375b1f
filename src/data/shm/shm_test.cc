// Partners of the shm plane that are dead, frozen or malicious. Each test speaks the bytes by hand;
// the plane must stay whole, and go on serving others.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>

#include <gtest/gtest.h>

#include "kvferry/memory.h"
#include "src/base/random.h"
#include "src/data/shm/shm_plane.h"
#include "src/data/stream/frames.h"
#include "src/data/stream/memory_file.h"
#include "src/data/stream/pipe.h"

namespace kvferry::data {
namespace {

using stream::Header;
using stream::Kind;
using stream::Pipe;

constexpr int kPatienceMs = 5000;
constexpr std::uint64_t kRing = 64 << 10;

std::string path_of(const PlaneAddress& address) {
  return address.substr(4, address.rfind('/') - 4);
}
Token life_of(const PlaneAddress& address) {
  return token_from_string(address.substr(address.rfind('/') + 1));
}
sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

// One end of a connection, spoken by hand.
class Hand {
 public:
  explicit Hand(OwnedFd fd) : fd_(std::move(fd)) {}
  static Hand to(const PlaneAddress& plane) {
    OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = unix_address(path_of(plane));
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return Hand(std::move(fd));
  }

  void say(Header header, const std::string& payload = {}, const std::vector<int>& fds = {}) {
    if (!payload.empty()) header.length = static_cast<std::uint32_t>(payload.size());
    std::string bytes(stream::kHeaderBytes, '\0');
    stream::store_header(bytes.data(), header);
    bytes += payload;
    iovec part{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 8)] = {};
    if (!fds.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
      cmsghdr* h = CMSG_FIRSTHDR(&message);
      h->cmsg_level = SOL_SOCKET;
      h->cmsg_type = SCM_RIGHTS;
      h->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
      std::memcpy(CMSG_DATA(h), fds.data(), sizeof(int) * fds.size());
    }
    (void)sendmsg(fd_.get(), &message, MSG_NOSIGNAL);  // the other end may have closed already
  }
  // The next frame; nothing when the other end has closed.
  std::optional<Header> hear() {
    char bytes[stream::kHeaderBytes];
    if (!read_all(bytes, sizeof bytes)) return std::nullopt;
    Header header;
    EXPECT_TRUE(stream::parse_header(bytes, header));
    payload_.resize(header.kind == Kind::kSlice ? 0 : header.length);
    if (!payload_.empty() && !read_all(payload_.data(), payload_.size())) return std::nullopt;
    return header;
  }
  [[nodiscard]] const std::string& payload() const { return payload_; }
  // That came with what was heard so far.
  [[nodiscard]] const std::vector<OwnedFd>& fds() const { return fds_; }
  bool is_closed() {
    while (hear()) {
    }
    return true;  // hear() ends with the connection, or the test fails by its patience
  }
  void ring(std::size_t times = 1) {
    const std::string bells(times, '\0');
    (void)send(fd_.get(), bells.data(), bells.size(), MSG_NOSIGNAL);
  }
  void close() { fd_ = OwnedFd(); }

 private:
  bool read_all(char* to, std::size_t bytes) {
    while (bytes > 0) {
      pollfd watched{fd_.get(), POLLIN, 0};
      if (poll(&watched, 1, kPatienceMs) <= 0) {
        ADD_FAILURE() << "no word within patience";
        return false;
      }
      iovec part{to, bytes};
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 8)] = {};
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      const ssize_t n = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
      if (n <= 0) return false;
      const cmsghdr* h = CMSG_FIRSTHDR(&message);
      for (std::size_t i = 0; h != nullptr && i < (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof fd);
        fds_.emplace_back(fd);
      }
      to += n;
      bytes -= static_cast<std::size_t>(n);
    }
    return true;
  }
  OwnedFd fd_;
  std::string payload_;
  std::vector<OwnedFd> fds_;
};

class Shm : public testing::Test {
 protected:
  static constexpr std::uint32_t kItems = 64, kItemBytes = 4096;
  static constexpr Token kToken{1, 2};
  Shm() : memory_(kItems * kItemBytes, 0xEE), plane_(make()) {
    slabs_ = std::make_shared<const std::vector<GrantSlab>>(std::vector<GrantSlab>{
        {reinterpret_cast<std::uint64_t>(memory_.data()), kItemBytes, kItemBytes, kItems}});
    std::vector<std::uint32_t> all(kItems);
    for (std::uint32_t i = 0; i < kItems; ++i) all[i] = i;
    EXPECT_TRUE(plane_->grant({GrantId{1}, kToken, false, {GrantGroup{slabs_, all}}}).ok());
  }
  std::unique_ptr<StreamPlane> make() {
    auto plane = create_shm_plane("/dev/shm", settings_, entropy_);
    EXPECT_TRUE(plane.ok()) << plane.status().to_string();
    return std::move(*plane);
  }
  CopyPlan plan(std::uint32_t count, std::uint64_t source = 0) const {
    return {CopyGroup{{Lane{.source = source,
                            .target = reinterpret_cast<std::uint64_t>(memory_.data()),
                            .source_item = kItemBytes,
                            .target_item = kItemBytes,
                            .rows = 1,
                            .bytes = kItemBytes}},
                      {kvferry::Run{0, 0, count}}}};
  }
  stream::Hello hello() const {
    stream::Hello hello;
    hello.life = life_of(plane_->address());
    return hello;
  }
  // An honest peer is served, whatever the others did.
  void expect_still_serving() {
    auto source = make();
    std::vector<std::uint8_t> bytes(kItemBytes, 0x77);
    CopyPlan p = plan(1, reinterpret_cast<std::uint64_t>(bytes.data()));
    source->write({WriteId{1}, plane_->address(), {kToken, false}, 1, p});
    EXPECT_TRUE(wait(*source).status.ok());
    EXPECT_EQ(memory_[0], 0x77);
  }
  static Completion wait(DataPlane& plane) {
    std::vector<Completion> done;
    pollfd watched{plane.ready_fd(), POLLIN, 0};
    while (done.empty() && ::poll(&watched, 1, kPatienceMs) > 0) plane.poll(done);
    EXPECT_FALSE(done.empty()) << "no completion within patience";
    return done.empty() ? Completion{} : done[0];
  }
  void expect_untouched() const {
    EXPECT_EQ(memory_, std::vector<std::uint8_t>(memory_.size(), 0xEE));
  }

  Settings settings_;
  KernelEntropy entropy_;
  std::vector<std::uint8_t> memory_;
  GrantSlabs slabs_;
  std::unique_ptr<StreamPlane> plane_;
};

TEST_F(Shm, MemoryThatCouldShrinkUnderItsMappingIsRefused) {
  const OwnedFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), kRing), 0);
  Hand hand = Hand::to(plane_->address());
  stream::Hello offer = hello();
  offer.ring_bytes = kRing;
  hand.say({Kind::kHello, 0, 0}, encode_hello(offer), {unsealed.get()});
  EXPECT_TRUE(hand.is_closed());
  expect_still_serving();
}

TEST_F(Shm, AnOfferThatDoesNotMatchItsDescriptorsIsRefused) {
  auto file = create_memory_file("test", kRing);
  ASSERT_TRUE(file.ok());
  stream::Hello longer = hello(), missing = hello(), huge = hello(), many = hello();
  longer.ring_bytes = 2 * kRing;  // than the file is
  missing.ring_bytes = kRing;
  missing.epoch_slots = 8;
  huge.ring_bytes = stream::kRingBytesMax + 1;
  many.regions.resize(stream::kRegionsMax + 1, {0x1000, 4096});
  for (const stream::Hello& offer : {longer, missing, huge, many}) {
    Hand hand = Hand::to(plane_->address());
    hand.say({Kind::kHello, 0, 0}, encode_hello(offer), {file->get()});
    EXPECT_TRUE(hand.is_closed());
  }
  expect_still_serving();
}

TEST_F(Shm, ASliceThatLeavesTheRingEndsItsConnection) {
  auto file = create_memory_file("test", kRing);
  ASSERT_TRUE(file.ok());
  for (const std::uint32_t length : {0U, static_cast<std::uint32_t>(kRing) + 1, 0xFFFFFFFFU}) {
    Hand hand = Hand::to(plane_->address());
    stream::Hello offer = hello();
    offer.ring_bytes = kRing;
    hand.say({Kind::kHello, 0, 0}, encode_hello(offer), {file->get()});
    hand.say({Kind::kBegin, 0, 5}, stream::encode_begin({kToken, false}, plan(kItems)));
    hand.say({Kind::kSlice, length, 5});
    EXPECT_TRUE(hand.is_closed());
  }
  expect_untouched();
  expect_still_serving();
}

// A source of pulled writes, by hand: it offers one region and an epoch.
struct PullSource {
  static constexpr std::uint64_t kBase = 0x7000000000, kBytes = 64 << 12;
  explicit PullSource(stream::Hello offer, const PlaneAddress& plane) : hand(Hand::to(plane)) {
    epoch_file = std::move(*create_memory_file("epochs", 4096));
    epochs = std::move(*Mapping::of(epoch_file.get(), 4096, true));
    file = std::move(*create_memory_file("region", kBytes));
    memory = std::move(*Mapping::of(file.get(), kBytes, true));
    std::memset(memory.data(), 0x55, kBytes);
    offer.epoch_slots = 4;
    offer.regions = {{kBase, kBytes}};
    hand.say({Kind::kHello, 0, 0}, encode_hello(offer), {epoch_file.get(), file.get()});
  }
  void pull(const Token& token, CopyPlan plan, std::uint32_t slot = 0, std::uint64_t epoch = 0) {
    stream::Begin begin;
    begin.authority = {token, false};
    begin.plan = std::move(plan);
    begin.epoch_slot = slot;
    begin.epoch = epoch;
    hand.say({Kind::kPull, 0, 9}, encode_pull(begin));
  }
  Hand hand;
  OwnedFd epoch_file, file;
  Mapping epochs, memory;
};

TEST_F(Shm, APulledWriteIsCopiedOutOfTheSourcesMemory) {
  PullSource source(hello(), plane_->address());
  source.pull(kToken, plan(3, PullSource::kBase));
  const auto done = source.hand.hear();
  ASSERT_TRUE(done && done->kind == Kind::kDone);
  EXPECT_TRUE(stream::decode_done(source.hand.payload()).ok());
  EXPECT_EQ(memory_[0], 0x55);
  EXPECT_EQ(memory_[3 * kItemBytes - 1], 0x55);
  EXPECT_EQ(memory_[3 * kItemBytes], 0xEE);
}

TEST_F(Shm, APulledWriteMayNotLeaveTheMemoryThatWasOffered) {
  PullSource source(hello(), plane_->address());
  CopyPlan below = plan(1, PullSource::kBase - 1), beyond = plan(1, PullSource::kBase + 1),
           far = plan(1, PullSource::kBase), wraps = plan(1, PullSource::kBase);
  beyond[0].lanes[0].source = PullSource::kBase + PullSource::kBytes - kItemBytes + 1;
  far[0].runs[0].source_first = 64;
  wraps[0].lanes[0].source_item = 1ULL << 63;
  wraps[0].runs[0] = {2, 0, 1};  // 2 × 2^63 is 0 in 64 bits
  for (const CopyPlan& p : {below, beyond, far, wraps}) {
    source.pull(kToken, p);
    const auto done = source.hand.hear();
    ASSERT_TRUE(done && done->kind == Kind::kDone);
    EXPECT_EQ(stream::decode_done(source.hand.payload()).code(), Code::kRefused);
  }
  source.pull(kToken, plan(1, PullSource::kBase), 5000);  // a word that was not offered
  const auto done = source.hand.hear();
  ASSERT_TRUE(done && done->kind == Kind::kDone);
  EXPECT_EQ(stream::decode_done(source.hand.payload()).code(), Code::kProtocol);
  expect_untouched();
  expect_still_serving();
}

TEST_F(Shm, APulledWriteIsCheckedAgainstTheGrant) {
  PullSource source(hello(), plane_->address());
  source.pull({9, 9}, plan(1, PullSource::kBase));
  const auto done = source.hand.hear();
  ASSERT_TRUE(done && done->kind == Kind::kDone);
  EXPECT_EQ(stream::decode_done(source.hand.payload()).code(), Code::kRefused);
  expect_untouched();
}

// The source went on while the target slept: what the target copies then does not count.
TEST_F(Shm, APulledWriteWhoseEpochHasPassedIsNeverCalledDone) {
  PullSource source(hello(), plane_->address());
  reinterpret_cast<std::atomic<std::uint64_t>*>(source.epochs.data())->store(1);
  source.pull(kToken, plan(kItems, PullSource::kBase), 0, 0);
  const auto answer = source.hand.hear();
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->kind, Kind::kCancelDone);
}

TEST_F(Shm, ASourceThatDiesInTheMiddleLeavesNothingBehind) {
  {
    PullSource source(hello(), plane_->address());
    CopyPlan p = plan(kItems, PullSource::kBase);
    for (int i = 0; i < 20000; ++i) p[0].runs.push_back(kvferry::Run{0, 0, kItems});
    source.pull(kToken, p);
  }
  expect_still_serving();
}

// A source that offers a ring and a pipe, and has switched to it.
struct PipeSource {
  static constexpr std::uint64_t kWay = 4096;
  // Where the counts lie (docs/DATA_PLANES.md, "Pipe").
  static constexpr std::size_t kPutAt = 0, kTakenAt = 256 + 128;

  PipeSource(stream::Hello offer, const PlaneAddress& plane) : hand(Hand::to(plane)) {
    const OwnedFd ring_file = std::move(*create_memory_file("ring", kRing));
    const OwnedFd file = std::move(*create_memory_file("pipe", Pipe::file_bytes(kWay)));
    ring = std::move(*Mapping::of(ring_file.get(), kRing, true));
    raw = std::move(*Mapping::of(file.get(), Pipe::file_bytes(kWay), true));
    pipe = Pipe(std::move(*Mapping::of(file.get(), Pipe::file_bytes(kWay), true)), kWay,
                Pipe::End::kSource);
    offer.ring_bytes = kRing;
    offer.pipe_bytes = kWay;
    hand.say({Kind::kHello, 0, 0}, encode_hello(offer), {ring_file.get(), file.get()});
    const auto word = hand.hear();
    EXPECT_TRUE(word && word->kind == Kind::kSwitch);
    hand.say({Kind::kSwitch, 0, 0});
  }
  void say(Header header, const std::string& payload = {}) {
    if (!payload.empty()) header.length = static_cast<std::uint32_t>(payload.size());
    std::string bytes(stream::kHeaderBytes, '\0');
    stream::store_header(bytes.data(), header);
    bytes += payload;
    std::string_view left = bytes;
    EXPECT_TRUE(pipe.put(left) && left.empty());
  }
  // A whole write of `items` of bytes 0x44, in one slice, said into the pipe.
  void say_write(const CopyPlan& plan, std::uint32_t items) {
    std::memset(ring.data(), 0x44, kRing);
    say({Kind::kBegin, 0, 5}, stream::encode_begin({Token{1, 2}, false}, plan));
    say({Kind::kSlice, items * 4096, 5});
  }
  // The next frame out of the pipe.
  std::optional<Header> hear() {
    std::string bytes;
    for (int i = 0; i < kPatienceMs; ++i) {
      char part[stream::kHeaderBytes];
      std::size_t n = 0;
      if (!pipe.take(part, sizeof part - bytes.size(), n)) return std::nullopt;
      bytes.append(part, n);
      Header header;
      if (bytes.size() == sizeof part && stream::parse_header(bytes.data(), header)) return header;
      if (n == 0) usleep(1000);
    }
    return std::nullopt;
  }
  void lie(std::size_t at, std::uint64_t count) {
    *reinterpret_cast<volatile std::uint64_t*>(raw.data() + at) = count;
    hand.ring();
  }
  Hand hand;
  Mapping ring, raw;
  Pipe pipe;
};

TEST_F(Shm, FramesComeThroughThePipeAfterTheSwitch) {
  PipeSource source(hello(), plane_->address());
  source.say_write(plan(3), 3);
  source.hand.ring();
  const auto done = source.hear();
  ASSERT_TRUE(done && done->kind == Kind::kDone);
  EXPECT_EQ(memory_[0], 0x44);
  EXPECT_EQ(memory_[3 * kItemBytes - 1], 0x44);
  EXPECT_EQ(memory_[3 * kItemBytes], 0xEE);
}

TEST_F(Shm, BellsWithoutEndAreNothingButBells) {
  PipeSource source(hello(), plane_->address());
  for (int i = 0; i < 64; ++i) source.hand.ring(16 << 10);
  source.say_write(plan(1), 1);
  source.hand.ring();
  const auto done = source.hear();
  ASSERT_TRUE(done && done->kind == Kind::kDone);
  expect_still_serving();
}

TEST_F(Shm, ACountOfThePipeThatCannotBeEndsItsConnection) {
  for (const std::size_t at : {PipeSource::kPutAt, PipeSource::kTakenAt}) {
    for (const std::uint64_t lie : {PipeSource::kWay + 1000, std::uint64_t{1} << 63}) {
      PipeSource source(hello(), plane_->address());
      source.lie(at, lie);
      // The lie about what was taken is found out with the next answer.
      if (at == PipeSource::kTakenAt) source.say_write(plan(1), 1);
      source.hand.ring();
      EXPECT_TRUE(source.hand.is_closed()) << at << " " << lie;
    }
  }
  expect_still_serving();
}

TEST_F(Shm, ASwitchToNoPipeOrToASecondOneEndsItsConnection) {
  Hand hand = Hand::to(plane_->address());
  hand.say({Kind::kHello, 0, 0}, encode_hello(hello()));
  hand.say({Kind::kSwitch, 0, 0});
  EXPECT_TRUE(hand.is_closed());

  PipeSource source(hello(), plane_->address());
  source.say({Kind::kSwitch, 0, 0});
  source.hand.ring();
  EXPECT_TRUE(source.hand.is_closed());
  expect_still_serving();
}

TEST_F(Shm, APipeThatIsShorterThanSaidOrLongerThanMayBeIsRefused) {
  const OwnedFd file = std::move(*create_memory_file("pipe", Pipe::file_bytes(4096)));
  for (const std::uint64_t bytes :
       {std::uint64_t{4097}, stream::kPipeBytesMax + 1, ~std::uint64_t{0}}) {
    Hand hand = Hand::to(plane_->address());
    stream::Hello offer = hello();
    offer.pipe_bytes = bytes;
    hand.say({Kind::kHello, 0, 0}, encode_hello(offer), {file.get()});
    EXPECT_TRUE(hand.is_closed());
  }
  expect_still_serving();
}

// What it had said before its end counts, as it does in a socket.
TEST_F(Shm, WhatWasInThePipeBeforeItsSourceEndedIsServed) {
  {
    PipeSource source(hello(), plane_->address());
    source.say_write(plan(2), 2);
  }
  auto honest = make();
  std::vector<std::uint8_t> bytes(kItemBytes, 0x77);
  bool landed = false;
  for (std::uint64_t id = 1; id < 1000 && !landed; ++id) {
    CopyPlan last = plan(1, reinterpret_cast<std::uint64_t>(bytes.data()));
    last[0].runs[0].target_first = kItems - 1;
    honest->write({WriteId{id}, plane_->address(), {kToken, false}, 1, last});
    ASSERT_TRUE(wait(*honest).status.ok());
    landed = memory_[2 * kItemBytes - 1] == 0x44;
  }
  EXPECT_TRUE(landed);
}

// A target that accepts and then does nothing, or says what is not true.
class FalseTarget {
 public:
  explicit FalseTarget(const std::string& path) : path_(path) {
    unlink(path.c_str());  // of a test that was killed
    listener_ = OwnedFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const sockaddr_un address = unix_address(path);
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address),
              0);
    EXPECT_EQ(listen(listener_.get(), 4), 0);
  }
  ~FalseTarget() { unlink(path_.c_str()); }
  [[nodiscard]] PlaneAddress address() const {
    return "shm/" + path_ + "/" + Token{5, 6}.to_string();
  }
  Hand accept() {
    pollfd watched{listener_.get(), POLLIN, 0};
    EXPECT_EQ(poll(&watched, 1, kPatienceMs), 1) << "nobody came within patience";
    return Hand(OwnedFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  }

 private:
  std::string path_;
  OwnedFd listener_;
};

TEST_F(Shm, ACancelCompletesThoughTheTargetIsFrozen) {
  FalseTarget target("/dev/shm/kvferry-test-frozen");
  std::vector<std::uint8_t> own(kItems * kItemBytes);
  plane_->write({WriteId{1},
                 target.address(),
                 {kToken, false},
                 1,
                 plan(kItems, reinterpret_cast<std::uint64_t>(own.data()))});
  Hand hand = target.accept();
  ASSERT_TRUE(hand.hear());  // the hello: the write is on its way
  ASSERT_TRUE(hand.hear());
  plane_->cancel(WriteId{1});
  const Completion done = wait(*plane_);
  EXPECT_EQ(done.status.code(), Code::kAborted);
  EXPECT_FALSE(done.settled) << "nobody has said that it reads no more";
}

// The target may copy out of the source's memory when it thaws; it must see then that nothing of it
// counts.
TEST_F(Shm, TheEpochMovesBeforeACancelledPullCompletes) {
  FalseTarget target("/dev/shm/kvferry-test-epoch");
  auto shared = SharedMemory::create(kItems * kItemBytes);
  ASSERT_TRUE(shared.ok());
  const std::vector<Region> regions{shared->region()};
  ASSERT_TRUE(plane_->register_memory(regions).ok());
  plane_->write(
      {WriteId{1}, target.address(), {kToken, false}, 1, plan(kItems, shared->region().base)});
  Hand hand = target.accept();
  ASSERT_TRUE(hand.hear());
  ASSERT_EQ(hand.fds().size(), 4U) << "ring, pipe, epochs, region";
  const auto epochs = Mapping::of(hand.fds()[2].get(), 4096, false);
  ASSERT_TRUE(epochs.ok());
  const auto pull = hand.hear();
  ASSERT_TRUE(pull && pull->kind == Kind::kPull);
  const auto begin = stream::decode_pull(hand.payload());
  ASSERT_TRUE(begin.ok());
  const auto& word =
      reinterpret_cast<const std::atomic<std::uint64_t>*>(epochs->data())[begin->epoch_slot];
  EXPECT_EQ(word.load(), begin->epoch);

  plane_->cancel(WriteId{1});
  const auto cancel = hand.hear();
  ASSERT_TRUE(cancel && cancel->kind == Kind::kCancel);
  EXPECT_NE(word.load(), begin->epoch);
  EXPECT_FALSE(wait(*plane_).settled);
}

TEST_F(Shm, ATargetThatGivesCreditForWhatItWasNotGivenLosesItsConnection) {
  FalseTarget target("/dev/shm/kvferry-test-credit");
  std::vector<std::uint8_t> own(kItems * kItemBytes);
  plane_->write({WriteId{1},
                 target.address(),
                 {kToken, false},
                 1,
                 plan(kItems, reinterpret_cast<std::uint64_t>(own.data()))});
  Hand hand = target.accept();
  hand.say({Kind::kCredit, 0, 1ULL << 40});
  EXPECT_EQ(wait(*plane_).status.code(), Code::kPeerLost);
}

TEST_F(Shm, ATargetThatTookMoreThanThePipeHeldLosesItsConnection) {
  FalseTarget target("/dev/shm/kvferry-test-taken");
  std::vector<std::uint8_t> own(kItems * kItemBytes);
  const auto write = [&](std::uint64_t id) {
    plane_->write({WriteId{id},
                   target.address(),
                   {kToken, false},
                   1,
                   plan(kItems, reinterpret_cast<std::uint64_t>(own.data()))});
  };
  write(1);
  Hand hand = target.accept();
  ASSERT_TRUE(hand.hear());
  const std::uint64_t bytes = Pipe::file_bytes(settings_.shm_pipe_bytes);
  const auto raw = Mapping::of(hand.fds()[1].get(), bytes, true);
  ASSERT_TRUE(raw.ok());
  reinterpret_cast<std::atomic<std::uint64_t>*>(raw->data() + 128)->store(1ULL << 40);
  hand.say({Kind::kSwitch, 0, 0});
  while (const auto word = hand.hear()) {
    if (word->kind == Kind::kSwitch) break;
  }
  write(2);
  EXPECT_EQ(wait(*plane_).status.code(), Code::kPeerLost);
}

// Its ring stays full, its socket unread: others do not notice.
TEST_F(Shm, APeerThatTakesNothingHoldsNobodyUp) {
  FalseTarget target("/dev/shm/kvferry-test-deaf");
  auto source = make();
  std::vector<std::uint8_t> own(kItems * kItemBytes, 0x66);
  CopyPlan endless = plan(kItems, reinterpret_cast<std::uint64_t>(own.data()));
  for (int i = 0; i < 1000; ++i) endless[0].runs.push_back(kvferry::Run{0, 0, kItems});
  source->write({WriteId{1}, target.address(), {kToken, false}, 1, endless});
  Hand deaf = target.accept();

  for (std::uint64_t id = 2; id < 10; ++id) {
    source->write({WriteId{id},
                   plane_->address(),
                   {kToken, false},
                   1,
                   plan(kItems, reinterpret_cast<std::uint64_t>(own.data()))});
    const Completion done = wait(*source);
    EXPECT_EQ(done.id, id);
    EXPECT_TRUE(done.status.ok()) << done.status.to_string();
  }
}

TEST_F(Shm, DoneBeforeEverythingWasSentIsNotBelieved) {
  FalseTarget target("/dev/shm/kvferry-test-early");
  settings_.shm_ring_bytes = kRing;  // smaller than the write: some of it waits for credit
  auto source = make();
  std::vector<std::uint8_t> own(kItems * kItemBytes);
  source->write({WriteId{1},
                 target.address(),
                 {kToken, false},
                 1,
                 plan(kItems, reinterpret_cast<std::uint64_t>(own.data()))});
  Hand hand = target.accept();
  hand.say({Kind::kDone, 0, 1}, stream::encode_done(Status()));
  EXPECT_EQ(wait(*source).status.code(), Code::kProtocol);
}

TEST_F(Shm, ASocketLeftBehindByADeadProcessIsRemoved) {
  const std::string leftover = "/dev/shm/kvferry-0123456789abcdef.sock";
  {
    const OwnedFd dead(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_un address = unix_address(leftover);
    ASSERT_EQ(bind(dead.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  ASSERT_EQ(access(leftover.c_str(), F_OK), 0);
  auto plane = make();
  EXPECT_NE(access(leftover.c_str(), F_OK), 0);
  EXPECT_EQ(access(path_of(plane->address()).c_str(), F_OK), 0) << "the living keep theirs";
}

}  // namespace
}  // namespace kvferry::data
