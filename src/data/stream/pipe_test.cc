// The pipe by itself: both ends in one process, each with a mapping of its own.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "src/base/random.h"
#include "src/data/stream/pipe.h"

namespace kvferry::data::stream {
namespace {

constexpr int kPatienceMs = 5000;
// Where the counts lie (docs/DATA_PLANES.md, "Pipe").
constexpr std::size_t kPutAt = 0, kTakenAt = 128;

struct Ends {
  explicit Ends(std::uint64_t way_bytes)
      : file(std::move(*create_memory_file("pipe", Pipe::file_bytes(way_bytes)))),
        raw(map(way_bytes)),
        source(map(way_bytes), way_bytes, Pipe::End::kSource),
        target(map(way_bytes), way_bytes, Pipe::End::kTarget) {}
  [[nodiscard]] Mapping map(std::uint64_t way_bytes) const {
    return std::move(*Mapping::of(file.get(), Pipe::file_bytes(way_bytes), true));
  }
  [[nodiscard]] std::atomic<std::uint64_t>& word(std::size_t at) const {
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(raw.data() + at);
  }
  OwnedFd file;
  Mapping raw;
  Pipe source, target;
};

std::string take(Pipe& pipe, std::size_t most) {
  std::string out(most, '\0');
  std::size_t n = 0;
  EXPECT_TRUE(pipe.take(out.data(), most, n));
  out.resize(n);
  return out;
}

TEST(Pipe, WhatGoesInComesOutInOrderAndNoMoreThanFits) {
  Ends ends(7);
  EXPECT_FALSE(ends.target.has_bytes());
  std::string_view ten = "0123456789";
  ASSERT_TRUE(ends.source.put(ten));
  EXPECT_EQ(ten, "789");
  EXPECT_FALSE(ends.source.has_room());
  EXPECT_EQ(take(ends.target, 5), "01234");
  EXPECT_TRUE(ends.source.has_room());
  ASSERT_TRUE(ends.source.put(ten));  // around the end
  EXPECT_TRUE(ten.empty());
  EXPECT_EQ(take(ends.target, 100), "56789");
  EXPECT_FALSE(ends.target.has_bytes());
  EXPECT_FALSE(ends.source.has_bytes()) << "the ways are apart";
}

TEST(Pipe, CountsThatCannotBeAreFoundOut) {
  Ends ends(64);
  std::size_t n = 0;
  char byte = 0;
  for (const std::uint64_t lie : {65ULL, 1ULL << 63}) {
    ends.word(kPutAt) = lie;
    EXPECT_TRUE(ends.target.has_bytes()) << "or nobody would look";
    EXPECT_FALSE(ends.target.take(&byte, 1, n)) << lie;
    ends.word(kTakenAt) = lie;
    std::string_view word = "x";
    EXPECT_TRUE(ends.source.has_room());
    EXPECT_FALSE(ends.source.put(word)) << lie;
    EXPECT_EQ(word, "x");
  }
}

TEST(Pipe, AWriterThatGoesBackIsFoundOut) {
  Ends ends(64);
  std::string_view word = "four";
  ASSERT_TRUE(ends.source.put(word));
  EXPECT_EQ(take(ends.target, 4), "four");
  ends.word(kPutAt) = 3;
  std::size_t n = 0;
  char byte = 0;
  EXPECT_FALSE(ends.target.take(&byte, 1, n));
}

TEST(Pipe, AReaderThatGoesBackGetsNoMore) {
  Ends ends(4);
  ends.word(kTakenAt) = ~std::uint64_t{0};  // one before the beginning
  std::string_view word = "four";
  ASSERT_TRUE(ends.source.put(word));
  EXPECT_EQ(word, "r");
}

TEST(Pipe, OneRingForEachSleepAndNoneForTheWakeful) {
  Ends ends(8);
  EXPECT_FALSE(ends.source.must_ring_for_bytes());
  ends.target.fall_asleep(false);
  EXPECT_FALSE(ends.source.must_ring_for_room()) << "it waits for bytes alone";
  EXPECT_TRUE(ends.source.must_ring_for_bytes());
  EXPECT_FALSE(ends.source.must_ring_for_bytes()) << "rung already";
  ends.target.fall_asleep(true);
  EXPECT_TRUE(ends.source.must_ring_for_room());
  ends.target.fall_asleep(true);
  ends.target.wake_up();
  EXPECT_FALSE(ends.source.must_ring_for_bytes());
}

TEST(Pipe, EachEndSaysWhereItRuns) {
  Ends ends(8);
  EXPECT_EQ(ends.source.other_processor(), -1);
  ends.target.say_processor(0);
  EXPECT_EQ(ends.source.other_processor(), 0);
  ends.target.say_processor(7);
  ends.target.fall_asleep(false);
  EXPECT_EQ(ends.source.other_processor(), 7);
  EXPECT_EQ(ends.target.other_processor(), -1);
}

// A lost ring would leave both asleep.
TEST(Pipe, TwoThatSleepWheneverTheyCanLoseNothing) {
  constexpr std::size_t kBytes = 1 << 20;
  Ends ends(97);
  const OwnedFd to_target(eventfd(0, EFD_NONBLOCK)), to_source(eventfd(0, EFD_NONBLOCK));
  const auto sleep = [](const OwnedFd& fd) {
    pollfd watched{fd.get(), POLLIN, 0};
    const bool rung = poll(&watched, 1, kPatienceMs) == 1;
    eventfd_t count = 0;
    (void)eventfd_read(fd.get(), &count);
    return rung;
  };
  std::string sent(kBytes, '\0'), came;
  Random random(5);
  for (char& c : sent) c = static_cast<char>(random.below(256));

  std::atomic<bool> stuck{false};
  std::thread source([&] {
    std::string_view left = sent;
    while (!left.empty() && !stuck) {
      if (!ends.source.put(left)) stuck = true;
      if (ends.source.must_ring_for_bytes()) eventfd_write(to_target.get(), 1);
      if (left.empty()) break;
      ends.source.fall_asleep(true);
      if (!ends.source.has_room() && !sleep(to_source)) stuck = true;
      ends.source.wake_up();
    }
  });
  char part[64];
  while (came.size() < kBytes && !stuck) {
    std::size_t n = 0;
    if (!ends.target.take(part, sizeof part, n)) stuck = true;
    came.append(part, n);
    if (n > 0 && ends.target.must_ring_for_room()) eventfd_write(to_source.get(), 1);
    if (n > 0) continue;
    ends.target.fall_asleep(false);
    if (!ends.target.has_bytes() && !sleep(to_target)) stuck = true;
    ends.target.wake_up();
  }
  source.join();
  EXPECT_FALSE(stuck);
  EXPECT_EQ(came, sent);
}

}  // namespace
}  // namespace kvferry::data::stream
