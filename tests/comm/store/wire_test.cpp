#include "comm/store/wire.h"

#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "libtorch/compat.h"

namespace tessera::comm {
namespace {

using ::testing::ElementsAre;

TEST(StoreWireTest, IsWhatC10dSpeaks) {
  using c10d::detail::QueryType;
  const auto same = [](wire::Query ours, QueryType theirs) {
    return static_cast<uint8_t>(ours) == static_cast<uint8_t>(theirs);
  };
  EXPECT_EQ(wire::kMagic, c10d::detail::validationMagicNumber);
  EXPECT_TRUE(same(wire::Query::kValidate, QueryType::VALIDATE));
  EXPECT_TRUE(same(wire::Query::kSet, QueryType::SET));
  EXPECT_TRUE(same(wire::Query::kCompareSet, QueryType::COMPARE_SET));
  EXPECT_TRUE(same(wire::Query::kGet, QueryType::GET));
  EXPECT_TRUE(same(wire::Query::kAdd, QueryType::ADD));
  EXPECT_TRUE(same(wire::Query::kCheck, QueryType::CHECK));
  EXPECT_TRUE(same(wire::Query::kWait, QueryType::WAIT));
  EXPECT_TRUE(same(wire::Query::kCount, QueryType::GETNUMKEYS));
  EXPECT_TRUE(same(wire::Query::kDelete, QueryType::DELETE_KEY));
  EXPECT_TRUE(same(wire::Query::kAppend, QueryType::APPEND));
  EXPECT_TRUE(same(wire::Query::kMultiGet, QueryType::MULTI_GET));
  EXPECT_TRUE(same(wire::Query::kMultiSet, QueryType::MULTI_SET));
  EXPECT_TRUE(same(wire::Query::kCancelWait, QueryType::CANCEL_WAIT));
  EXPECT_TRUE(same(wire::Query::kPing, QueryType::PING));
  EXPECT_TRUE(same(wire::Query::kQueuePush, QueryType::QUEUE_PUSH));
  EXPECT_TRUE(same(wire::Query::kQueuePop, QueryType::QUEUE_POP));
  EXPECT_TRUE(same(wire::Query::kQueueLength, QueryType::QUEUE_LEN));
  EXPECT_TRUE(same(wire::Query::kListKeys, QueryType::LIST_KEYS));
#if TESSERA_TORCH_AT_LEAST(2, 13)
  EXPECT_TRUE(same(wire::Query::kBarrier, QueryType::BARRIER));
#endif
}

TEST(StoreWireTest, ARequestIsTakenOnceAllOfItIsThere) {
  using wire::Message;
  using wire::Query;
  const Message messages[] = {
      Message(Query::kPing).number<uint32_t>(7),
      Message(Query::kCompareSet).key("k").text("was").text("is"),
      Message(Query::kAdd).key("n").number<int64_t>(-3),
      Message(Query::kMultiSet)
          .number<uint64_t>(2)
          .key("a")
          .text("1")
          .key("b")
          .text(""),
      Message(Query::kCount)};
  for (const Message& message : messages) {
    const std::string text = message.bytes() + "rest";
    for (size_t size = 0; size < message.bytes().size(); ++size) {
      std::string_view part = std::string_view(text).substr(0, size);
      size_t needed = 0;
      EXPECT_FALSE(wire::take_request(part, needed).has_value());
      EXPECT_EQ(part.size(), size); // nothing was taken
      EXPECT_GT(needed, size);
      EXPECT_LE(needed, message.bytes().size());
    }
    std::string_view rest = text;
    size_t needed = 0;
    EXPECT_TRUE(wire::take_request(rest, needed).has_value());
    EXPECT_EQ(rest, "rest");
    EXPECT_EQ(needed, message.bytes().size());
  }
  std::string_view text = messages[3].bytes();
  size_t needed = 0;
  const auto request = wire::take_request(text, needed);
  EXPECT_THAT(request->keys, ElementsAre("/a", "/b"));
  EXPECT_THAT(request->values, ElementsAre("1", ""));
}

/// Requests with some bytes changed: each is taken, refused or found short.
TEST(StoreWireTest, TakesNothingThatIsNotThere) {
  using wire::Message;
  using wire::Query;
  const Message messages[] = {
      Message(Query::kSet).key("key").text("value"),
      Message(Query::kWait).number<uint64_t>(3).key("a").key("b").key("c"),
      Message(Query::kMultiSet).number<uint64_t>(1).key("a").text("1"),
      Message(Query::kBarrier).key("b").number<int64_t>(2)};
  std::mt19937 random(7);
  const auto below = [&](size_t limit) { return random() % limit; };
  int num_taken = 0;
  int num_refused = 0;
  int num_short = 0;
  for (int i = 0; i < 100'000; ++i) {
    const std::string& message = messages[below(std::size(messages))].bytes();
    // Exactly as large as it is, so that a sanitizer sees a step beyond it.
    std::vector<char> bytes(message.begin(), message.end());
    for (size_t left = 1 + below(3); left > 0; --left) {
      bytes[below(bytes.size())] = static_cast<char>(below(256));
    }
    std::string_view rest(bytes.data(), bytes.size());
    size_t needed = 0;
    try {
      const auto request = wire::take_request(rest, needed);
      if (!request) {
        ++num_short;
        ASSERT_GT(needed, bytes.size());
        continue;
      }
      ++num_taken;
      ASSERT_EQ(needed + rest.size(), bytes.size());
      for (const auto& texts : {request->keys, request->values}) {
        for (const std::string_view text : texts) {
          ASSERT_TRUE(
              text.empty() ||
              (text.data() > bytes.data() && text.end() <= rest.begin()));
        }
      }
    } catch (const wire::BadRequest&) {
      ++num_refused;
    }
  }
  EXPECT_GT(num_taken, 1000);
  EXPECT_GT(num_refused, 1000);
  EXPECT_GT(num_short, 1000);
}

} // namespace
} // namespace tessera::comm
