#include <gtest/gtest.h>

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

TEST(Base, NumbersAreParsedWhole) {
  EXPECT_EQ(parse_int<int>("-5"), -5);
  EXPECT_FALSE(parse_int<int>(" 5"));
  EXPECT_FALSE(parse_int<int>("5x"));
  EXPECT_FALSE(parse_int<std::uint64_t>("-5"));
  EXPECT_FALSE(parse_int<std::uint64_t>("18446744073709551616"));
}

}  // namespace
}  // namespace kvferry
