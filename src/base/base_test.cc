#include <sched.h>

#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "kvferry/config.h"
#include "src/base/deadlines.h"
#include "src/base/numa.h"
#include "src/base/parse.h"
#include "src/base/random.h"

namespace kvferry {
namespace {

TEST(Base, TokenSurvivesItsText) {
  Random random(7);
  const Token token = random.token();
  EXPECT_EQ(token_from_string(token.to_string()), token);
  EXPECT_TRUE(token_from_string("12").is_zero());
  EXPECT_TRUE(token_from_string(std::string(32, 'g')).is_zero());
}

TEST(Base, RandomIsTheSameEverywhere) {
  Random random(1);
  EXPECT_EQ(random.next64(), 0x910a2dec89025cc1ULL);
}

TEST(Base, AddressesAreBracketedWhenIpv6) {
  EXPECT_EQ((Address{"::1", 80}.host_port()), "[::1]:80");
  EXPECT_EQ(parse_address("[fe80::1]:7")->host, "fe80::1");
  EXPECT_FALSE(parse_address("::1:80").ok());
  EXPECT_FALSE(parse_address("host:70000").ok());
  EXPECT_FALSE(parse_address("host").ok());
}

TEST(Settings, EveryRowIsReadBackAsItIsPrinted) {
  for (const SettingRow& row : setting_rows(Settings{})) {
    Settings settings;
    EXPECT_TRUE(set_setting(settings, row.name, row.value).ok()) << row.name;
    EXPECT_EQ(settings, Settings{}) << row.name;
    EXPECT_FALSE(row.environment.empty() || row.meaning.empty() || row.range.empty()) << row.name;
  }
}

TEST(Settings, AValueOutsideItsRangeIsRefusedWithTheRange) {
  Settings settings;
  const Status status = set_setting(settings, "waiting_timeout", "0");
  EXPECT_EQ(status.message(), "waiting_timeout: '0' is not a whole number from 1 to 86400 s");
  EXPECT_FALSE(set_setting(settings, "nothing", "1").ok());
  const Status wrong = apply_environment(settings, [](const char* name) {
    return std::strcmp(name, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT") == 0 ? "abc" : nullptr;
  });
  EXPECT_NE(wrong.message().find("SGLANG_DISAGGREGATION_WAITING_TIMEOUT = abc"), std::string::npos);
}

TEST(Deadlines, OneDeadlineAKeyInTheOrderOfTime) {
  Deadlines<int> deadlines;
  const auto at = [](int n) { return Time(Duration(n)); };
  deadlines.set(1, at(10));
  deadlines.set(2, at(5));
  deadlines.set(1, at(3));
  EXPECT_EQ(deadlines.next(), at(3));
  EXPECT_FALSE(deadlines.pop_due(at(2)));
  EXPECT_EQ(deadlines.pop_due(at(9)), 1);
  EXPECT_EQ(deadlines.pop_due(at(9)), 2);
  EXPECT_EQ(deadlines.next(), Time::max());
}

TEST(Numa, ListsOfProcessorsAreReadAsTheKernelPrintsThem) {
  EXPECT_EQ(parse_cpu_list("0-3,8,10-11\n"), (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cpu_list("0\n"), std::vector<int>{0});
  for (const char* bad : {"", "\n", "a", "1-", "3-1", "1,", ",1", "0-99999", "-1"})
    EXPECT_TRUE(parse_cpu_list(bad).empty()) << bad;
}

TEST(Numa, AThreadStaysWithinTheProcessorsThatItMayUse) {
  std::thread([] {
    cpu_set_t before, after;
    ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    EXPECT_FALSE(run_near(1 << 20)) << "a node that is not there";
    ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
    EXPECT_TRUE(CPU_EQUAL(&before, &after));
    if (!run_near(0)) return;  // a kernel without nodes
    ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      EXPECT_TRUE(!CPU_ISSET(cpu, &after) || CPU_ISSET(cpu, &before)) << cpu;
  }).join();
}

TEST(Base, NumbersAreParsedWhole) {
  EXPECT_EQ(parse_int<int>("-5"), -5);
  EXPECT_FALSE(parse_int<int>(" 5"));
  EXPECT_FALSE(parse_int<int>("5x"));
  EXPECT_FALSE(parse_int<std::uint64_t>("-5"));
  EXPECT_FALSE(parse_int<std::uint64_t>("18446744073709551616"));
}

}  // namespace
}  // namespace kvferry
