#include <tessera/state/state_dict.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <random>
#include <sstream>

#include "base/byte_vector.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

StateDict make_state() {
  return StateDict{
      {"model", StateDict{{"fc.weight", torch::arange(6.).view({2, 3})}}},
      {"optim",
       StateDict{
           {"state",
            StateDict{
                {0, StateDict{{"step", torch::tensor(1.f)}, {"none", nullptr}}},
                {"fc.weight", StateDict{{"exp_avg", torch::zeros({4})}}}}},
           {"param_groups",
            StateList{StateDict{
                {"lr", 0.1},
                {"fused", true},
                {"name", "all"},
                {"params", StateList{0, 1}}}}}}},
      {"epoch", 3},
      {"empty", StateDict()},
      {"nothing", StateList()}};
}

TEST(StateDictTest, KeepsTheOrderOfInsertion) {
  StateDict dict;
  for (int i = 20; i > 0; --i) {
    dict.set(i, i);
  }
  EXPECT_EQ(dict.begin()->first, StateKey(20));
  EXPECT_TRUE(dict.erase(19));
  EXPECT_FALSE(dict.erase(19));
  dict.set(20, "again");
  EXPECT_EQ(dict.keys()[0], StateKey(20));
  EXPECT_EQ(dict.keys()[1], StateKey(18));
  EXPECT_EQ(dict.at(1).to_int(), 1);
  EXPECT_EQ(dict.at(20).string(), "again");
  EXPECT_EQ(dict.size(), 19u);
}

TEST(StateDictTest, AnIdIsNotItsDigits) {
  const StateDict dict{{0, "id"}, {"0", "name"}};
  EXPECT_EQ(dict.at(0).string(), "id");
  EXPECT_EQ(dict.at("0").string(), "name");
  EXPECT_THAT(
      error_of([&] { (void)dict.keys()[1].id(); }), HasSubstr("is a name"));
}

TEST(StateDictTest, ABoolIsNoInt) {
  const StateDict dict{{"flag", true}, {"count", 1}};
  EXPECT_TRUE(dict.at("flag").is_bool());
  EXPECT_TRUE(dict.at("count").is_int());
  EXPECT_NE(dict.at("flag"), dict.at("count"));
}

TEST(StateDictTest, PathsCrossKeysWithDots) {
  const StateDict state = make_state();
  EXPECT_EQ(
      state.at_path("model.fc.weight").tensor().sizes(),
      (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(state.at_path("optim.state.0.step").tensor().item<float>(), 1);
  EXPECT_EQ(state.at_path("optim.param_groups.0.params.1").to_int(), 1);
  EXPECT_EQ(state.find_path("optim.param_groups.1"), nullptr);
  EXPECT_EQ(state.find_path("optim.param_groups.0x"), nullptr);
  EXPECT_EQ(state.find_path(""), nullptr);
}

TEST(StateDictTest, APathThatEndsNowhereSaysHowFarItLed) {
  EXPECT_THAT(
      error_of(
          [] { make_state().at_path("optim.state.fc.weight.exp_avg_sq"); }),
      HasSubstr(
          "\"optim.state.fc.weight\" exists, but \"exp_avg_sq\" is not in it"));
}

TEST(StateDictTest, AMissingKeySuggestsTheNearest) {
  const StateDict dict{{"layers.0.weight", 1}, {"layers.0.bias", 2}};
  EXPECT_THAT(
      error_of([&] { (void)dict.at("layers.0.wieght"); }),
      HasSubstr("Did you mean \"layers.0.weight\"?"));
  EXPECT_THAT(
      error_of([&] { (void)dict.at("qqqqqqqq"); }),
      ::testing::Not(HasSubstr("Did you mean")));
}

TEST(StateDictTest, AnotherKindIsATypeError) {
  const StateDict dict{{"a", "text"}};
  EXPECT_THROW((void)dict.at("a").tensor(), c10::TypeError);
  EXPECT_THAT(
      error_of([&] { (void)dict.at("a").dict(); }),
      HasSubstr("holds a string, asked for a dict"));
}

TEST(StateDictTest, CopiesShareTensorsClonesDoNot) {
  const StateDict state = make_state();
  const StateDict copy = state;
  const StateDict clone = state.clone();
  state.at_path("model.fc.weight").tensor().fill_(7);
  EXPECT_EQ(copy, state);
  EXPECT_NE(clone, state);
  EXPECT_EQ(clone.at_path("model.fc.weight").tensor()[1][2].item<float>(), 5);
}

TEST(StateDictTest, ACopyOfADictIsItsOwn) {
  StateDict state = make_state();
  StateDict copy = state;
  copy.at("optim").dict().erase("state");
  copy.set("epoch", 4);
  EXPECT_TRUE(state.at("optim").dict().contains("state"));
  EXPECT_EQ(state.at("epoch").to_int(), 3);
  const StateDict moved = std::move(copy);
  copy.set("usable", 1); // NOLINT: a moved-from one is empty
  EXPECT_EQ(copy.size(), 1u);
}

TEST(StateDictTest, EqualityIgnoresOrderAndSeesBits) {
  const StateDict a{{"x", 1}, {"y", torch::tensor({0.f, NAN})}};
  const StateDict b{{"y", torch::tensor({0.f, NAN})}, {"x", 1}};
  EXPECT_EQ(a, b);
  b.at("y").tensor()[0] = -0.f;
  EXPECT_NE(a, b);
  EXPECT_EQ(diff_state_dicts(a, b), ""); // but they compare equal
}

TEST(StateDictTest, DiffNamesPathAndElement) {
  StateDict a = make_state();
  StateDict b = a.clone();
  EXPECT_EQ(diff_state_dicts(a, b), "");
  b.at_path("model.fc.weight").tensor()[1][2] += 0.5;
  EXPECT_EQ(
      diff_state_dicts(a, b),
      "model.fc.weight: element [1, 2]: 5 against 5.5\n");
  EXPECT_EQ(diff_state_dicts(a, b, {.rtol = 0.2}), "");
  b.set("epoch", 4);
  b.erase("empty");
  b.set("more", 1);
  EXPECT_EQ(
      diff_state_dicts(a, b, {.atol = 0.5}),
      "epoch: 3 against 4\n"
      "empty: only in the first\n"
      "more: only in the second\n");
  EXPECT_EQ(
      diff_state_dicts(a, b, {}, 1),
      "model.fc.weight: element [1, 2]: 5 against 5.5\nand 3 more\n");
}

TEST(StateDictTest, DiffSeesShapesDtypesAndKinds) {
  const StateDict a{{"t", torch::zeros({2})}, {"k", 1}, {"l", StateList{1}}};
  const StateDict b{
      {"t", torch::zeros({2}, torch::kDouble)}, {"k", 1.0}, {"l", StateList()}};
  const std::string text = diff_state_dicts(a, b);
  EXPECT_THAT(text, HasSubstr("t: Float [2] on cpu: 0, 0 against Double [2]"));
  EXPECT_THAT(text, HasSubstr("k: 1 against 1"));
  EXPECT_THAT(text, HasSubstr("l: 1 items against 0"));
}

TEST(StateDictTest, FlattenGivesPathsAndUnflattenTheSameAgain) {
  const StateDict state = make_state();
  const FlatState flat = flatten_state_dict(state);
  std::vector<std::string> paths;
  for (const auto& leaf : flat.leaves) {
    paths.push_back(leaf.path);
  }
  EXPECT_THAT(
      paths,
      ::testing::ElementsAre(
          "model.fc.weight",
          "optim.state.0.step",
          "optim.state.0.none",
          "optim.state.fc.weight.exp_avg",
          "optim.param_groups.0.lr",
          "optim.param_groups.0.fused",
          "optim.param_groups.0.name",
          "optim.param_groups.0.params.0",
          "optim.param_groups.0.params.1",
          "epoch",
          "empty",
          "nothing"));
  EXPECT_EQ(unflatten_state_dict(flat), state);
}

TEST(StateDictTest, FlattenRefusesTwoValuesOfOnePath) {
  const StateDict dict{{"a.b", 1}, {"a", StateDict{{"b", 2}}}};
  EXPECT_THAT(
      error_of([&] { (void)flatten_state_dict(dict); }),
      HasSubstr("two values have the path \"a.b\""));
}

TEST(StateDictTest, UnflattenRefusesLeavesThatDoNotFit) {
  FlatState flat = flatten_state_dict(StateDict{{"a", StateDict{{"b", 1}}}});
  flat.leaves.push_back({"a", {"a"}, {false}, 2});
  EXPECT_THAT(
      error_of([&] { (void)unflatten_state_dict(flat); }), HasSubstr("\"a\""));
  FlatState gap = flatten_state_dict(StateDict{{"l", StateList{1, 2}}});
  gap.leaves.erase(gap.leaves.begin());
  EXPECT_THAT(
      error_of([&] { (void)unflatten_state_dict(gap); }),
      HasSubstr("do not follow"));
}

TEST(StateDictTest, PrintsTensorsInShort) {
  std::ostringstream out;
  out << make_state();
  EXPECT_THAT(
      out.str(),
      HasSubstr("  fc.weight: Float [2, 3] on cpu: 0, 1, 2, 3, ...\n"));
  EXPECT_THAT(out.str(), HasSubstr("      params: [0, 1]\n"));
  EXPECT_THAT(out.str(), HasSubstr("epoch: 3\n"));
}

TEST(StateBytesTest, EveryKindSurvives) {
  StateDict state = make_state();
  for (const auto dtype :
       {at::kHalf, at::kBFloat16, at::kLong, at::kBool, at::kComplexFloat}) {
    state.set(c10::toString(dtype), torch::ones({2, 0, 3}, dtype));
    state.set(std::string(c10::toString(dtype)) + "1", torch::ones({3}, dtype));
  }
  state.set("view", torch::arange(12).view({3, 4}).t());
  state.set("undefined", at::Tensor());
  state.set("scalar", torch::tensor(2.5));
  const StateDict back = state_dict_from_bytes(state_dict_to_bytes(state));
  EXPECT_EQ(back, state) << diff_state_dicts(back, state);
  EXPECT_EQ(back.keys(), state.keys());
}

TEST(StateBytesTest, ShardedTensorsNeedAGroup) {
  on_ranks(2, [](const Group& world) {
    const ShardedTensor tensor(
        {4, 2},
        at::kFloat,
        {{ShardedTensor::Box{{2 * world.rank(), 0}, {2, 2}},
          torch::rand({2, 2})}},
        world);
    const StateDict state{{"t", tensor}};
    const Bytes bytes = state_dict_to_bytes(state);
    EXPECT_EQ(state_dict_from_bytes(bytes, world), state);
    EXPECT_THAT(
        error_of([&] { (void)state_dict_from_bytes(bytes); }),
        HasSubstr("needs a group"));
    const StateDict clone = state.clone();
    clone.at("t").sharded().pieces()[0].tensor[1][0] += 1;
    EXPECT_THAT(
        diff_state_dicts(state, clone),
        HasSubstr(
            "t: element [" + std::to_string(2 * world.rank() + 1) + ", 0]: "));
  });
}

TEST(StateBytesTest, WhatIsCutOffIsRefused) {
  const Bytes bytes = state_dict_to_bytes(make_state());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(
        (void)state_dict_from_bytes(std::span(bytes).first(size)),
        c10::ValueError)
        << size;
  }
  Bytes longer = bytes;
  longer.push_back(0);
  EXPECT_THROW((void)state_dict_from_bytes(longer), c10::ValueError);
}

TEST(StateBytesTest, SpoiledBytesThrowOrReadAsSomethingElse) {
  const Bytes bytes = state_dict_to_bytes(make_state());
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    Bytes spoiled = bytes;
    for (int n = 0; n < 3; ++n) {
      spoiled[random() % spoiled.size()] = static_cast<uint8_t>(random());
    }
    try {
      (void)state_dict_from_bytes(spoiled);
    } catch (const c10::ValueError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(StateBytesTest, SizesThatOverflowAreRefused) {
  Bytes bytes = state_dict_to_bytes(StateDict{{"t", torch::zeros({0, 2, 3})}});
  // The three sizes are the last numbers.
  for (const int64_t size : {int64_t{1} << 62, int64_t{1} << 40}) {
    Bytes spoiled = bytes;
    std::memcpy(spoiled.data() + spoiled.size() - 16, &size, 8);
    std::memcpy(spoiled.data() + spoiled.size() - 8, &size, 8);
    EXPECT_THROW((void)state_dict_from_bytes(spoiled), c10::ValueError);
  }
}

TEST(StateBytesTest, DeepNestsAreRefused) {
  StateDict deep;
  for (int i = 0; i < 200; ++i) {
    StateDict outer;
    outer.set("d", std::move(deep));
    deep = std::move(outer);
  }
  const Bytes bytes = state_dict_to_bytes(deep);
  EXPECT_THAT(
      error_of([&] { (void)state_dict_from_bytes(bytes); }),
      HasSubstr("nested too deeply"));
}

StateValue random_value(int depth) {
  switch (*rc::gen::inRange(0, depth > 0 ? 8 : 6)) {
    case 0:
      return {};
    case 1:
      return *rc::gen::arbitrary<int64_t>();
    case 2:
      return *rc::gen::arbitrary<double>();
    case 3:
      return *rc::gen::arbitrary<bool>();
    case 4:
      return *rc::gen::arbitrary<std::string>();
    case 5:
      return torch::rand({*rc::gen::inRange<int64_t>(0, 4), 2});
    case 6: {
      StateList list;
      const int count = *rc::gen::inRange(0, 4);
      for (int i = 0; i < count; ++i) {
        list.push_back(random_value(depth - 1));
      }
      return list;
    }
    default: {
      StateDict dict;
      const int count = *rc::gen::inRange(0, 4);
      for (int i = 0; i < count; ++i) {
        dict.set("k" + std::to_string(i), random_value(depth - 1));
      }
      return dict;
    }
  }
}

TEST(StateBytesTest, AnyStateSurvivesBytesAndFlattening) {
  const bool held = rc::check([] {
    StateDict state;
    const int count = *rc::gen::inRange(0, 5);
    for (int i = 0; i < count; ++i) {
      state.set(i, random_value(3));
    }
    RC_ASSERT(state_dict_from_bytes(state_dict_to_bytes(state)) == state);
    RC_ASSERT(unflatten_state_dict(flatten_state_dict(state)) == state);
    RC_ASSERT(state.clone() == state);
    RC_ASSERT(diff_state_dicts(state, state.clone()).empty());
  });
  EXPECT_TRUE(held);
}

/// Without their marks, parts of several ranks would pass for copies of one
/// tensor where the ranks save what they received.
TEST(StateBytesTest, MarksOfTensorsSurvive) {
  StateDict state;
  state.set(
      "part",
      StateValue::part(
          torch::ones({2}),
          {.parameter = "weight", .unit = "head", .rank = 1, .num_ranks = 3}));
  state.set("nothing", StateValue::part(at::Tensor(), {"bias", "", 0, 2}));
  state.set("any", StateValue::of_any_rank(torch::ones({2})));
  state.set("plain", torch::ones({2}));

  const StateDict read = state_dict_from_bytes(state_dict_to_bytes(state));

  const PartOf* part = read.at("part").part_of();
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->parameter, "weight");
  EXPECT_EQ(part->unit, "head");
  EXPECT_EQ(part->rank, 1);
  EXPECT_EQ(part->num_ranks, 3);
  EXPECT_TRUE(torch::equal(read.at("part").tensor(), torch::ones({2})));
  ASSERT_NE(read.at("nothing").part_of(), nullptr);
  EXPECT_FALSE(read.at("nothing").tensor().defined());
  EXPECT_TRUE(read.at("any").is_of_any_rank());
  EXPECT_EQ(read.at("plain").part_of(), nullptr);
  EXPECT_FALSE(read.at("plain").is_of_any_rank());
}

TEST(StateBytesTest, RefusesAPartOfARankThatIsNone) {
  StateDict state;
  state.set("x", StateValue::part(torch::ones({1}), {"weight", "", 3, 3}));
  const auto bytes = state_dict_to_bytes(state);
  EXPECT_THROW(state_dict_from_bytes(bytes), c10::ValueError);
}

} // namespace
} // namespace tessera
