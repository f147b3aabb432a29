// test/distributed/fsdp/test_fsdp_optim_state.py, class TestFSDPOptimState:
// state that goes from one model to another, with another wrapping, order of
// parameters, or number of ranks.
#include "parity/optim_state_support.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using parity::check_load_legacy;
using parity::check_load_with_osd;
using parity::kBooleans;
using parity::LeafRuns;
using parity::LoadCase;
using parity::on_two_and_four_ranks;
using parity::OsdMethod;
using parity::text;
using tessera::testing::on_ranks;

StateDictSettings full_settings(bool rank0_only) {
  auto settings = StateDictSettings::of(StateDictType::FullStateDict);
  settings.optim_config = FullOptimStateDictConfig().rank0_only(rank0_only);
  return settings;
}

StateDictSettings sharded_settings() {
  return StateDictSettings::of(StateDictType::ShardedStateDict);
}

/// Every wrapping, grouping and order of the nested model.
void for_each_nested_case(
    const std::function<void(const std::string&, const LoadCase&)>& body) {
  for (const bool multi_groups : kBooleans) {
    for (const bool wrap_alt : kBooleans) {
      for (const bool diff_inputs : kBooleans) {
        body(
            text("multi_groups", multi_groups) + text("wrap_alt", wrap_alt) +
                text("diff_inputs", diff_inputs),
            {.multi_groups = multi_groups,
             .reversed = diff_inputs ? LoadCase::Reversed::OddRanks
                                     : LoadCase::Reversed::None,
             .wrap_alt = wrap_alt});
      }
    }
  }
}

/// Without and with optim_input.
void run_legacy(
    LeafRuns& leaves,
    const std::string& name,
    const Group& world,
    const LoadCase& load,
    OsdMethod method) {
  for (const bool use_optim_input : kBooleans) {
    leaves.run(name + text("optim_input", use_optim_input), [&] {
      check_load_legacy(world, load, method, use_optim_input);
    });
  }
}

void run_with_osd(
    LeafRuns& leaves,
    const std::string& name,
    const Group& world,
    const LoadCase& load,
    const StateDictSettings& settings) {
  leaves.run(name + "optim_state_dict", [&] {
    check_load_with_osd(world, load, settings);
  });
}

/// The nested model's hardest case, on half of the ranks.
void test_halved_nested(OsdMethod method, bool rank0_only) {
  on_ranks(4, [&](const Group& world) {
    LoadCase load{
        .multi_groups = true,
        .halve = true,
        .reversed = LoadCase::Reversed::OddRanks,
        .wrap_alt = true};
    LeafRuns leaves(world);
    run_legacy(leaves, "", world, load, method);
    run_with_osd(leaves, "", world, load, full_settings(rank0_only));
    // Stronger: odd ranks are not in the half, so that PyTorch reverses no
    // order here. Let the rank in the half decide.
    load.reversed = LoadCase::Reversed::OddRanksOfGroup;
    LeafRuns extra(world, LeafRuns::Kind::Extra);
    run_legacy(extra, "by group rank ", world, load, method);
    run_with_osd(
        extra, "by group rank ", world, load, full_settings(rank0_only));
  });
}

void test_halved_transformer(OsdMethod method, bool rank0_only) {
  on_ranks(4, [&](const Group& world) {
    const LoadCase load{.model = LoadCase::Model::Transformer, .halve = true};
    LeafRuns leaves(world);
    run_legacy(leaves, "", world, load, method);
    run_with_osd(leaves, "", world, load, full_settings(rank0_only));
  });
}

TEST(TestFSDPOptimState, test_shard_full_optim_state_dict_nested) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    for_each_nested_case([&](const std::string& name, const LoadCase& load) {
      run_legacy(leaves, name, world, load, OsdMethod::Broadcast);
      LoadCase one_group = load;
      one_group.multi_groups = false;
      run_with_osd(leaves, name, world, one_group, full_settings(false));
    });
  });
}

TEST(
    TestFSDPOptimState,
    test_shard_full_optim_state_dict_nested_halve_world_size) {
  test_halved_nested(OsdMethod::Broadcast, /*rank0_only=*/false);
}

TEST(TestFSDPOptimState, test_shard_full_optim_state_dict_transformer) {
  test_halved_transformer(OsdMethod::Broadcast, /*rank0_only=*/false);
}

TEST(TestFSDPOptimState, test_scatter_full_optim_state_dict_nested) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    for_each_nested_case([&](const std::string& name, const LoadCase& load) {
      run_legacy(leaves, name, world, load, OsdMethod::Scatter);
      run_with_osd(leaves, name, world, load, full_settings(true));
    });
  });
}

TEST(
    TestFSDPOptimState,
    test_scatter_full_optim_state_dict_nested_halve_world_size) {
  test_halved_nested(OsdMethod::Scatter, /*rank0_only=*/true);
}

TEST(TestFSDPOptimState, test_scatter_full_optim_state_dict_transformer) {
  test_halved_transformer(OsdMethod::Scatter, /*rank0_only=*/true);
}

/// From sharded tensors, to the same ranks.
void test_flatten(const LoadCase& load) {
  on_two_and_four_ranks([&](const Group& world, LeafRuns& leaves) {
    leaves.run("flatten", [&] {
      check_load_legacy(
          world, load, OsdMethod::Flatten, /*use_optim_input=*/false);
    });
    run_with_osd(leaves, "", world, load, sharded_settings());
  });
}

TEST(TestFSDPOptimState, test_flatten_sharded_optim_state_dict_nested) {
  test_flatten({.wrap_alt = true});
}

TEST(TestFSDPOptimState, test_flatten_sharded_optim_state_dict_transformer) {
  test_flatten({.model = LoadCase::Model::Transformer});
}

/// From flat parameters to original ones.
void test_original_params(
    const Group& world,
    LeafRuns& leaves,
    const std::vector<bool>& halvings) {
  for (const bool rank0_only : kBooleans) {
    for (const bool halve : halvings) {
      for (const bool wrap_alt : kBooleans) {
        run_with_osd(
            leaves,
            text("rank0_only", rank0_only) + text("halve", halve) +
                text("wrap_alt", wrap_alt),
            world,
            {.halve = halve, .wrap_alt = wrap_alt, .use_orig_params = true},
            full_settings(rank0_only));
      }
    }
  }
  for (const bool wrap_alt : kBooleans) {
    run_with_osd(
        leaves,
        "sharded " + text("wrap_alt", wrap_alt),
        world,
        {.wrap_alt = wrap_alt, .use_orig_params = true},
        sharded_settings());
  }
}

TEST(TestFSDPOptimState, test_use_orig_params) {
  on_ranks(4, [](const Group& world) {
    LeafRuns leaves(world);
    test_original_params(world, leaves, {true, false});
  });
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world, LeafRuns::Kind::Extra);
    test_original_params(world, leaves, {false});
  });
}

} // namespace
} // namespace tessera
