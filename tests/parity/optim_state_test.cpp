// test/distributed/fsdp/test_fsdp_optim_state.py, class TestFSDPOptimState:
// what is saved, under which keys, and what is refused.
#include <tessera/optim/adam.h>
#include <tessera/recompute/recompute.h>
#include <tessera/transfer/model_state.h>

#include <c10/util/Exception.h>

#include <algorithm>

#include "parity/nested_model.h"
#include "parity/optim_state_support.h"
#include "support/device.h"
#include "support/errors.h"

namespace tessera {
namespace {

using parity::broadcast_osd;
using parity::expect_same_osd;
using parity::expect_throws;
using parity::init_nested;
using parity::kBooleans;
using parity::Keys;
using parity::LeafRuns;
using parity::NestedInit;
using parity::NestedModel;
using parity::on_two_and_four_ranks;
using parity::step_model;
using parity::text;
using parity::Trainee;
using tessera::testing::error_of;
using tessera::testing::test_device;

constexpr StateDictType kTypes[] = {
    StateDictType::FullStateDict,
    StateDictType::ShardedStateDict};
constexpr auto kPlain = NestedInit::Wrapping::None;

std::string text(StateDictType type) {
  return type == StateDictType::FullStateDict ? "full " : "sharded ";
}

/// Sharded state comes without optim_input.
std::vector<bool> optim_inputs(StateDictType type) {
  return type == StateDictType::FullStateDict ? std::vector{false, true}
                                              : std::vector{false};
}

/// The model and its optimizer, by themselves.
Trainee trainee_of(const NestedModel& model, std::vector<at::Tensor> params) {
  Trainee trainee;
  trainee.module = model.ptr();
  trainee.optim_input = OptimInput(params);
  trainee.optim = std::make_unique<optim::Adam>(params, 1e-3);
  trainee.loss = [module = model.ptr()] {
    return module->forward(module->input().to(test_device())).sum();
  };
  return trainee;
}

FullOptimStateOptions full_options(
    const Trainee& trainee,
    bool use_optim_input,
    bool rank0_only) {
  return FullOptimStateOptions()
      .optim_input(use_optim_input ? trainee.optim_input : std::nullopt)
      .rank0_only(rank0_only);
}

LoadOptimStateOptions load_options(
    const Trainee& trainee,
    bool use_optim_input) {
  LoadOptimStateOptions options;
  if (use_optim_input) {
    options.optim_input(trainee.optim_input);
  } else {
    options.optim(*trainee.optim);
  }
  return options;
}

// --- test_optim_state_dict_nested

struct NestedCase {
  StateDictType type;
  bool multi_groups;
  bool rank0_only;
  bool diff_inputs;
};

void check_nested(
    const Group& world,
    const NestedCase& leaf,
    bool use_optim_input) {
  const bool is_sharded = leaf.type == StateDictType::ShardedStateDict;
  if (leaf.rank0_only && is_sharded) {
    return; // there is no such thing, in PyTorch either
  }
  NestedInit init{
      .multi_groups = leaf.multi_groups,
      .reversed = leaf.diff_inputs && world.rank() % 2 == 1};
  Trainee wrapped = init_nested(init);
  const auto losses = step_model(wrapped);
  const StateDict osd = is_sharded
      ? sharded_optim_state_dict(*wrapped.module, *wrapped.optim)
      : full_optim_state_dict(
            *wrapped.module,
            *wrapped.optim,
            full_options(wrapped, use_optim_input, leaf.rank0_only));
  if (leaf.rank0_only && world.rank() != 0) {
    EXPECT_TRUE(osd.empty()) << osd;
    return;
  }
  init.wrapping = kPlain;
  Trainee plain = init_nested(init);
  EXPECT_EQ(losses, step_model(plain)); // to the last bit
  expect_same_osd(osd, plain.state_dict(), Keys::Any);
}

TEST(TestFSDPOptimState, test_optim_state_dict_nested) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    for (const StateDictType type : kTypes) {
      for (const bool multi_groups : kBooleans) {
        for (const bool rank0_only : kBooleans) {
          for (const bool diff_inputs : kBooleans) {
            for (const bool use_optim_input : kBooleans) {
              leaves.run(
                  text(type) + text("multi_groups", multi_groups) +
                      text("rank0_only", rank0_only) +
                      text("diff_inputs", diff_inputs) +
                      text("optim_input", use_optim_input),
                  [&] {
                    check_nested(
                        world,
                        {type, multi_groups, rank0_only, diff_inputs},
                        use_optim_input);
                  });
            }
          }
        }
      }
    }
  });
}

// --- test_full_optim_state_dict_keys

constexpr char kCheckpointSegment[] = "_checkpoint_wrapped_module";

std::vector<std::string> sorted(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> sorted_names(const StateDict& dict) {
  std::vector<std::string> names;
  for (const StateKey& key : dict.keys()) {
    names.push_back(key.name());
  }
  return sorted(names);
}

TEST(TestFSDPOptimState, test_full_optim_state_dict_keys) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      NestedModel model;
      const auto plain_names = sorted(model->named_parameters().keys());
      model->to(test_device());
      parity::wrap_ignoring_a_bias(*model);
      // block2, a member of the model.
      EXPECT_EQ(
          apply_activation_checkpointing<torch::nn::Sequential>(*model), 1);
      const auto raw_names = model->named_parameters().keys();
      EXPECT_THAT(
          raw_names,
          ::testing::Contains(::testing::HasSubstr(kCheckpointSegment)));

      Trainee trainee = trainee_of(model, parameters(*model));
      step_model(trainee, 1);
      const StateDict osd = full_optim_state_dict(
          *model, *trainee.optim, FullOptimStateOptions().rank0_only(false));
      const StateDict model_state = [&] {
        const StateDictTypeGuard guard(*model, StateDictType::FullStateDict);
        return state_dict(*model);
      }();
      const auto names = sorted_names(osd.at("state").dict());
      EXPECT_EQ(names, sorted_names(model_state));
      EXPECT_EQ(names, plain_names);
      for (const std::string& name : names) {
        EXPECT_EQ(name.find(kCheckpointSegment), std::string::npos) << name;
      }
    });
  });
}

TEST(TestFSDPOptimState, test_full_optim_state_dict_nested_invalid) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    leaves.run("", [&] {
      NestedModel model;
      model->to(test_device());
      parity::wrap(*model);
      auto params = parameters(*model);
      ASSERT_EQ(params.size(), 13u);
      if (world.rank() != 0) {
        params.pop_back(); // block2.2
      }
      Trainee trainee = trainee_of(model, params);
      step_model(trainee);
      const auto save = [&] { full_optim_state_dict(*model, *trainee.optim); };
      expect_throws<c10::Error>(
          save,
          "FSDP currently requires each rank to have at least the optimizer "
          "states needed by rank 0's optimizer but some ranks are missing some "
          "of those states");
      // Stronger: it says what is missing, and can be said again.
      expect_throws<c10::Error>(save, "block2.2.weight");
    });
  });
}

// --- test_shard_full_optim_state_dict_unmanaged_params

/// `step` as a plain number, which other optimizers keep.
StateDict with_plain_steps(StateDict osd) {
  StateDict& state = osd.at("state").dict();
  for (const StateKey& key : state.keys()) {
    StateValue& step = state.at(key).dict().at("step");
    step = StateValue(step.tensor().item<double>());
  }
  return osd;
}

void check_unmanaged_params(
    StateDictType type,
    bool add_to_fsdp_module,
    bool use_optim_input) {
  constexpr int kSteps = 1;
  const bool is_full = type == StateDictType::FullStateDict;
  Trainee source = init_nested({});
  step_model(source, kSteps);
  const StateDict osd = is_full
      ? full_optim_state_dict(
            *source.module,
            *source.optim,
            full_options(source, use_optim_input, /*rank0_only=*/false))
      : sharded_optim_state_dict(*source.module, *source.optim);

  NestedModel model;
  model->to(test_device());
  const at::Tensor unmanaged = parity::register_unmanaged_param(
      add_to_fsdp_module ? *model->block2->ptr(2) : *model);
  parity::wrap(*model);
  Trainee target = trainee_of(model, parameters(*model));
  const auto convert = [&](const StateDict& from) {
    return is_full
        ? shard_full_optim_state_dict(
              from, *model, load_options(target, use_optim_input))
        : flatten_sharded_optim_state_dict(from, *model, *target.optim);
  };
  if (add_to_fsdp_module) {
    constexpr char kError[] =
        "All unflattened parameters comprising a single flat parameter must "
        "have scalar state with the same value and dtype";
    expect_throws<c10::ValueError>([&] { convert(osd); }, kError);
    EXPECT_THAT(error_of([&] { convert(osd); }), ::testing::StartsWith(kError));
    EXPECT_THAT(
        error_of([&] { convert(with_plain_steps(osd)); }),
        ::testing::StartsWith(kError));
    return;
  }
  StateDict converted = convert(osd);
  EXPECT_FALSE(converted.at("state").dict().contains(1));
  parity::add_unmanaged_param_entry(converted, unmanaged, kSteps);
  EXPECT_TRUE(
      converted.at("state").dict().contains(1)); // after the root's bias
  target.load_state_dict(converted);
  // Stronger: what was loaded is there.
  parity::expect_same_state(target.state_dict(), converted);
}

TEST(TestFSDPOptimState, test_shard_full_optim_state_dict_unmanaged_params) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    for (const StateDictType type : kTypes) {
      for (const bool add_to_fsdp_module : kBooleans) {
        for (const bool use_optim_input : optim_inputs(type)) {
          leaves.run(
              text(type) + text("add_to_fsdp_module", add_to_fsdp_module) +
                  text("optim_input", use_optim_input),
              [&] {
                check_unmanaged_params(
                    type, add_to_fsdp_module, use_optim_input);
              });
        }
      }
    }
  });
}

// --- rekey_optim_state_dict

void check_rekey_to_ids(
    const Group& world,
    StateDictType type,
    bool multi_groups,
    bool use_optim_input) {
  const bool is_full = type == StateDictType::FullStateDict;
  Trainee wrapped = init_nested({.multi_groups = multi_groups});
  step_model(wrapped);
  const StateDict osd = is_full
      ? broadcast_osd(
            full_optim_state_dict(
                *wrapped.module,
                *wrapped.optim,
                full_options(wrapped, use_optim_input, /*rank0_only=*/true)),
            world)
      : sharded_optim_state_dict(*wrapped.module, *wrapped.optim);

  Trainee plain =
      init_nested({.wrapping = kPlain, .multi_groups = multi_groups});
  step_model(plain);
  const StateDict rekeyed = rekey_optim_state_dict(
      osd,
      OptimStateKeyType::ParamId,
      *plain.module,
      load_options(plain, use_optim_input));
  expect_same_osd(rekeyed, plain.state_dict());
  if (is_full) {
    plain.load_state_dict(rekeyed);
    step_model(plain);
  }
}

TEST(TestFSDPOptimState, test_rekey_optim_state_dict_to_ids) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    for (const StateDictType type : kTypes) {
      for (const bool multi_groups : kBooleans) {
        for (const bool use_optim_input : optim_inputs(type)) {
          leaves.run(
              text(type) + text("multi_groups", multi_groups) +
                  text("optim_input", use_optim_input),
              [&] {
                check_rekey_to_ids(world, type, multi_groups, use_optim_input);
              });
        }
      }
    }
  });
}

TEST(TestFSDPOptimState, test_rekey_optim_state_dict_to_names) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    for (const bool use_optim_input : kBooleans) {
      leaves.run(text("optim_input", use_optim_input), [&] {
        Trainee wrapped = init_nested({});
        step_model(wrapped);
        Trainee plain = init_nested({.wrapping = kPlain});
        step_model(plain);
        const StateDict rekeyed = rekey_optim_state_dict(
            plain.state_dict(),
            OptimStateKeyType::ParamName,
            *plain.module,
            load_options(plain, use_optim_input));
        const StateDict sharded = shard_full_optim_state_dict(
            rekeyed, *wrapped.module, load_options(wrapped, use_optim_input));
        expect_same_osd(sharded, wrapped.state_dict());
        wrapped.load_state_dict(sharded);
        step_model(wrapped);
      });
    }
  });
}

// --- test_optim_input_warning

/// How many warnings of a call say that optim_input is deprecated. All must be
/// of the type that is for that, LibTorch's only one beside plain warnings.
int count_warnings(const std::function<void()>& call) {
  struct Counter : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      if (warning.msg().find("`optim_input` argument is deprecated") !=
          std::string::npos) {
        ++count;
        EXPECT_TRUE(
            std::holds_alternative<c10::DeprecationWarning>(warning.type()))
            << warning.msg();
      }
    }
    int count = 0;
  };
  Counter counter;
  const c10::WarningUtils::WarningHandlerGuard guard(&counter);
  call();
  return counter.count;
}

/// Expects that `call`, which is told whether to give optim_input, warns if it
/// does, every time, and else does not.
void expect_warning(
    const char* name,
    const std::function<void(bool use_optim_input)>& call) {
  SCOPED_TRACE(name);
  EXPECT_GE(count_warnings([&] { call(true); }), 1);
  EXPECT_GE(count_warnings([&] { call(true); }), 1) << "the second time";
  EXPECT_EQ(count_warnings([&] { call(false); }), 0);
}

TEST(TestFSDPOptimState, test_optim_input_warning) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      Trainee wrapped = init_nested({});
      step_model(wrapped, 2);
      StateDict osd;
      expect_warning("full_optim_state_dict", [&](bool use_optim_input) {
        osd = full_optim_state_dict(
            *wrapped.module,
            *wrapped.optim,
            full_options(wrapped, use_optim_input, /*rank0_only=*/false));
      });
      expect_warning("shard_full_optim_state_dict", [&](bool use_optim_input) {
        shard_full_optim_state_dict(
            osd, *wrapped.module, load_options(wrapped, use_optim_input));
      });
      expect_warning(
          "scatter_full_optim_state_dict", [&](bool use_optim_input) {
            scatter_full_optim_state_dict(
                osd, *wrapped.module, load_options(wrapped, use_optim_input));
          });

      Trainee plain = init_nested({.wrapping = kPlain});
      expect_warning("rekey to ids", [&](bool use_optim_input) {
        rekey_optim_state_dict(
            osd,
            OptimStateKeyType::ParamId,
            *plain.module,
            load_options(plain, use_optim_input));
      });
      step_model(plain, 2);
      expect_warning("rekey to names", [&](bool use_optim_input) {
        rekey_optim_state_dict(
            plain.state_dict(),
            OptimStateKeyType::ParamName,
            *plain.module,
            load_options(plain, use_optim_input));
      });
    });
  });
}

} // namespace
} // namespace tessera
