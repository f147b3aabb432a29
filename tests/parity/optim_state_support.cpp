#include "parity/optim_state_support.h"

#include <tessera/optim/adam.h>
#include <tessera/optim/state_dict.h>

#include <algorithm>

#include "base/byte_vector.h"
#include "parity/nested_model.h"
#include "support/device.h"

namespace tessera::parity {

using tessera::testing::test_device;
using torch::optim::OptimizerParamGroup;

StateDict Trainee::state_dict() const {
  return optim::state_dict(*optim);
}

void Trainee::load_state_dict(const StateDict& osd) {
  optim::load_state_dict(*optim, osd);
}

// ---- Models ---------------------------------------------------------------

namespace {

constexpr double kLearningRate = 0.01;

NestedModel make_nested(const NestedInit& init) {
  NestedModel model;
  model->to(test_device());
  FSDPOptions options;
  options.process_group(init.group).use_orig_params(init.use_orig_params);
  switch (init.wrapping) {
    case NestedInit::Wrapping::None:
      break;
    case NestedInit::Wrapping::Usual:
      wrap(*model, options);
      break;
    case NestedInit::Wrapping::Alternative:
      wrap_alt(*model, options);
      break;
  }
  return model;
}

std::vector<at::Tensor> ordered(std::vector<at::Tensor> params, bool reversed) {
  if (reversed) {
    std::reverse(params.begin(), params.end());
  }
  return params;
}

std::vector<OptimizerParamGroup> param_groups(
    NestedModelImpl& model,
    bool reversed) {
  std::vector<at::Tensor> second = parameters(*model.block2);
  for (const at::Tensor& param : parameters(*model.block0)) {
    second.push_back(param);
  }
  auto decays = std::make_unique<optim::AdamOptions>();
  decays->weight_decay(0.9);
  return {
      OptimizerParamGroup(ordered(parameters(*model.block1), reversed)),
      OptimizerParamGroup(ordered(second, reversed), std::move(decays))};
}

} // namespace

Trainee init_nested(const NestedInit& init) {
  NestedModel model = make_nested(init);
  Trainee trainee;
  trainee.module = model.ptr();
  if (init.multi_groups) {
    const auto groups = param_groups(*model, init.reversed);
    trainee.optim_input = OptimInput(groups);
    trainee.optim = std::make_unique<optim::Adam>(groups, kLearningRate);
  } else {
    const auto params = ordered(parameters(*model), init.reversed);
    trainee.optim_input = OptimInput(params);
    trainee.optim = std::make_unique<optim::Adam>(params, kLearningRate);
  }
  trainee.loss = [model]() mutable {
    return model(NestedModelImpl::input().to(test_device())).sum();
  };
  return trainee;
}

Trainee init_transformer(const std::optional<Group>& group) {
  const auto model =
      make_recursive_transformer(FSDPOptions().process_group(group));
  Trainee trainee;
  trainee.module = model.module();
  trainee.optim =
      std::make_unique<optim::Adam>(parameters(*model), kLearningRate);
  trainee.loss = [model] {
    auto [src, tgt] = TransformerWithSharedParamsImpl::input();
    src = src.to(test_device());
    tgt = tgt.to(test_device());
    return TransformerWithSharedParamsImpl::loss(model(src, tgt), tgt);
  };
  return trainee;
}

std::vector<double> step_model(Trainee& trainee, int iterations) {
  torch::manual_seed(0);
  std::vector<double> losses;
  for (int i = 0; i < iterations; ++i) {
    trainee.optim->zero_grad();
    const at::Tensor loss = trainee.loss();
    losses.push_back(loss.item<double>());
    loss.backward();
    trainee.optim->step();
  }
  return losses;
}

// ---- State ----------------------------------------------------------------

StateDict broadcast_osd(const StateDict& osd, const Group& group) {
  const Bytes bytes = group.rank() == 0 ? state_dict_to_bytes(osd) : Bytes();
  return state_dict_from_bytes(group.broadcast_bytes(bytes, 0, "osd"));
}

namespace {

std::vector<StateKey> sorted_keys(const StateDict& dict) {
  std::vector<StateKey> keys = dict.keys();
  std::sort(keys.begin(), keys.end());
  return keys;
}

/// With full tensors in place of sharded ones. In the order of the keys, which
/// is the same on all ranks.
StateDict gathered(const StateDict& dict) {
  StateDict result;
  for (const StateKey& key : sorted_keys(dict)) {
    const StateValue& value = dict.at(key);
    if (value.is_dict()) {
      result.set(key, gathered(value.dict()));
    } else if (value.is_sharded()) {
      result.set(key, value.sharded().full_tensor());
    } else {
      result.set(key, value);
    }
  }
  return result;
}

/// As torch.isclose, with the same names and kinds.
bool are_equal_states(const StateValue& a, const StateValue& b) {
  return diff_state_dicts(
             a.dict(), b.dict(), DiffTolerance{.rtol = 1e-5, .atol = 1e-8})
      .empty();
}

StateDict groups_of(const StateDict& osd, Keys keys) {
  StateList groups = osd.at("param_groups").list();
  for (StateValue& group : groups) {
    EXPECT_TRUE(group.dict().contains("params"));
    if (keys == Keys::Any) {
      group.dict().erase("params");
    }
  }
  return {{"param_groups", groups}};
}

} // namespace

void expect_same_state(
    const StateDict& actual,
    const StateDict& expected,
    Keys keys) {
  ASSERT_TRUE(actual.contains("state"));
  ASSERT_TRUE(expected.contains("state"));
  const StateDict ours = gathered(actual.at("state").dict());
  const StateDict& theirs = expected.at("state").dict();
  if (keys == Keys::Same) {
    EXPECT_EQ(sorted_keys(ours), sorted_keys(theirs));
    EXPECT_TRUE(is_close(ours, theirs));
    return;
  }
  EXPECT_EQ(ours.size(), theirs.size());
  for (const auto& item : ours) {
    EXPECT_TRUE(std::any_of(
        theirs.begin(),
        theirs.end(),
        [&](const auto& other) {
          return are_equal_states(item.second, other.second);
        }))
        << item.first.text() << " has no equal";
  }
}

void expect_same_param_groups(
    const StateDict& actual,
    const StateDict& expected,
    Keys keys) {
  ASSERT_TRUE(actual.contains("param_groups"));
  ASSERT_TRUE(expected.contains("param_groups"));
  EXPECT_TRUE(is_close(groups_of(actual, keys), groups_of(expected, keys)));
}

void expect_same_osd(
    const StateDict& actual,
    const StateDict& expected,
    Keys keys) {
  expect_same_param_groups(actual, expected, keys);
  expect_same_state(actual, expected, keys);
}

// ---- From one model to another --------------------------------------------

namespace {

Trainee init_first(const LoadCase& load) {
  return load.model == LoadCase::Model::Nested
      ? init_nested({.multi_groups = load.multi_groups})
      : init_transformer(std::nullopt);
}

bool is_reversed(const Group& world, const Group& group, const LoadCase& load) {
  switch (load.reversed) {
    case LoadCase::Reversed::None:
      return false;
    case LoadCase::Reversed::OddRanks:
      return world.rank() % 2 == 1;
    case LoadCase::Reversed::OddRanksOfGroup:
      return group.rank() % 2 == 1;
  }
  return false;
}

Trainee init_second(
    const Group& world,
    const Group& group,
    const LoadCase& load) {
  if (load.model == LoadCase::Model::Transformer) {
    return init_transformer(group);
  }
  using Wrapping = NestedInit::Wrapping;
  return init_nested(
      {.wrapping = load.wrap_alt ? Wrapping::Alternative : Wrapping::Usual,
       .group = group,
       .multi_groups = load.multi_groups,
       .reversed = is_reversed(world, group, load),
       .use_orig_params = load.use_orig_params});
}

/// The ranks of the second model; nothing on a rank that is not among them.
std::optional<Group> group_of(const Group& world, const LoadCase& load) {
  return load.halve ? world.subgroup({0, 2}, "even ranks") : world;
}

StateDict save_legacy(
    const Trainee& trainee,
    OsdMethod method,
    bool use_optim_input,
    const std::optional<Group>& group) {
  if (method == OsdMethod::Flatten) {
    return sharded_optim_state_dict(*trainee.module, *trainee.optim, group);
  }
  return full_optim_state_dict(
      *trainee.module,
      *trainee.optim,
      FullOptimStateOptions()
          .optim_input(use_optim_input ? trainee.optim_input : std::nullopt)
          .group(group));
}

StateDict convert_legacy(
    const StateDict& osd,
    const Trainee& trainee,
    OsdMethod method,
    bool use_optim_input,
    const Group& group) {
  LoadOptimStateOptions options;
  if (use_optim_input) {
    options.optim_input(trainee.optim_input);
  } else {
    options.optim(*trainee.optim);
  }
  switch (method) {
    case OsdMethod::Broadcast:
      return shard_full_optim_state_dict(
          broadcast_osd(osd, group), *trainee.module, options);
    case OsdMethod::Scatter:
      // full_optim_state_dict() gave it to rank 0 alone.
      EXPECT_EQ(osd.empty(), group.rank() != 0);
      options.group(group);
      return scatter_full_optim_state_dict(
          group.rank() == 0 ? std::optional(osd) : std::nullopt,
          *trainee.module,
          options);
    case OsdMethod::Flatten:
      return flatten_sharded_optim_state_dict(
          osd, *trainee.module, *trainee.optim);
  }
  return {};
}

/// A rank that has nothing of a parameter has no state for it.
void expect_no_empty_state(const StateDict& osd, const Trainee& trainee) {
  int64_t id = 0;
  for (const auto& group : trainee.optim->param_groups()) {
    for (const at::Tensor& param : group.params()) {
      EXPECT_FALSE(param.numel() == 0 && osd.at("state").dict().contains(id));
      ++id;
    }
  }
}

/// What was converted from both models is what the second one has: they were
/// trained alike.
void check_converted(
    Trainee& trainee,
    const StateDict& converted_from_first,
    const StateDict& converted_from_own) {
  const StateDict own = trainee.state_dict();
  EXPECT_FALSE(own.at("state").dict().empty());
  {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, "its own state");
    expect_same_osd(converted_from_own, own);
    expect_no_empty_state(converted_from_own, trainee);
  }
  {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, "the other's state");
    expect_same_osd(converted_from_first, own);
    expect_no_empty_state(converted_from_first, trainee);
  }
  trainee.load_state_dict(converted_from_own);
  step_model(trainee);
}

} // namespace

void check_load_legacy(
    const Group& world,
    const LoadCase& load,
    OsdMethod method,
    bool use_optim_input) {
  Trainee first = init_first(load);
  step_model(first);
  const StateDict osd1 =
      save_legacy(first, method, use_optim_input, std::nullopt);

  const std::optional<Group> group = group_of(world, load);
  if (!group) {
    return;
  }
  Trainee second = init_second(world, *group, load);
  step_model(second);
  const StateDict osd2 = save_legacy(second, method, use_optim_input, group);

  const auto convert = [&](const StateDict& osd) {
    return convert_legacy(osd, second, method, use_optim_input, *group);
  };
  const StateDict converted1 = convert(osd1);
  const StateDict converted2 = convert(osd2);
  check_converted(second, converted1, converted2);
}

void check_load_with_osd(
    const Group& world,
    const LoadCase& load,
    const StateDictSettings& settings) {
  Trainee first = init_first(load);
  set_state_dict_type(*first.module, settings);
  step_model(first);
  const StateDict osd1 = optim_state_dict(*first.module, *first.optim);

  const std::optional<Group> group = group_of(world, load);
  if (!group) {
    return;
  }
  Trainee second = init_second(world, *group, load);
  set_state_dict_type(*second.module, settings);
  step_model(second);
  const StateDict osd2 = optim_state_dict(
      *second.module, *second.optim, OptimStateOptions().group(group));

  const auto* full =
      std::get_if<FullOptimStateDictConfig>(&settings.optim_config);
  const bool rank0_only = full != nullptr && full->rank0_only();
  EXPECT_EQ(osd2.empty(), rank0_only && group->rank() != 0);

  const auto convert = [&](const StateDict& osd) {
    return optim_state_dict_to_load(
        *second.module,
        *second.optim,
        osd,
        OptimStateToLoadOptions().group(group));
  };
  const StateDict converted1 = convert(osd1);
  const StateDict converted2 = convert(osd2);
  check_converted(second, converted1, converted2);
}

} // namespace tessera::parity
