// A bundle by itself: its shard, its full buffer and its gradients.
#include "engine/bundle.h"

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/owners.h"
#include "libtorch/compat.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::engine {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

constexpr Layout::Kind kKinds[] = {Layout::Kind::Flat, Layout::Kind::Dim0};

/// A bundle of two parameters, (5, 3) and (4), whose values are the same on all
/// ranks. Neither divides by two or three ranks.
class TwoParams {
 public:
  TwoParams(const Groups& groups, const UnitOptions& options)
      : values{torch::arange(15.).view({5, 3}), torch::arange(100., 104.)},
        bundle(make(groups, options)) {}
  TwoParams(const Group& world, Layout::Kind kind)
      : TwoParams({.all = world, .shard = world}, {.layout = kind}) {}

  void gather() {
    bundle->start_gather("gather", 0);
    bundle->finish_gather();
  }
  void free() {
    bundle->free_full("it was freed");
  }
  /// A view of the full buffer, as a face is; to be made while it has bytes.
  at::Tensor full(size_t index) const {
    return view(bundle->full(), index);
  }
  at::Tensor view(const at::Tensor& buffer, size_t index) const {
    const Layout& layout = bundle->layout();
    return buffer.narrow(0, layout.full_offset(index), layout.numel(index))
        .view(layout.shape(index));
  }
  /// This rank's part of whole values of a parameter.
  at::Tensor part(const at::Tensor& whole, size_t index, int rank) const {
    const Run run = bundle->layout().run(index, rank);
    return whole.reshape({-1}).narrow(0, run.param_begin, run.numel);
  }
  /// The same of a tensor that has the layout of the shard.
  at::Tensor in_shard(const at::Tensor& shard, size_t index, int rank) const {
    const Run run = bundle->layout().run(index, rank);
    return shard.narrow(0, run.shard_begin, run.numel);
  }
  void add_gradients(double first, double second) {
    bundle->gradients().add(
        {torch::full({5, 3}, first), torch::full({4}, second)}, {true, true});
  }
  BundleGradients::Reduced reduce(bool all_reduce = true) {
    bundle->gradients().start_reduction(all_reduce, "reduce");
    return bundle->gradients().finish_reduction("reduce");
  }
  size_t idle_buffers() const {
    size_t count = 0;
    pool.for_each_idle([&](const c10::DataPtr&, size_t) { ++count; });
    return count;
  }

  const std::vector<at::Tensor> values;
  BufferPool pool;
  const std::unique_ptr<Bundle> bundle;

 private:
  std::unique_ptr<Bundle> make(
      const Groups& groups,
      const UnitOptions& options) {
    Layout layout(options.layout, {{5, 3}, {4}}, groups.shard.size());
    const at::Tensor shard = torch::zeros({layout.shard_numel()});
    for (size_t index = 0; index < values.size(); ++index) {
      const Run run = layout.run(index, groups.shard.rank());
      shard.narrow(0, run.shard_begin, run.numel)
          .copy_(
              values[index].view({-1}).narrow(0, run.param_begin, run.numel));
    }
    return std::make_unique<Bundle>(
        std::move(layout), shard, at::kCPU, groups, options, pool);
  }
};

/// A group of this rank alone.
Group alone(const Group& world) {
  return *world.split(world.rank());
}

TEST(BundleTest, AGatherBringsTheWholeParametersInBothLayouts) {
  on_ranks(3, [](const Group& world) {
    for (const auto kind : kKinds) {
      TwoParams params(world, kind);
      params.gather();
      for (size_t index = 0; index < 2; ++index) {
        EXPECT_TRUE(torch::equal(params.full(index), params.values[index]));
      }
      params.free();
    }
  });
}

TEST(BundleTest, AViewOfTheFullBufferOutlivesItsBytes) {
  on_ranks(2, [](const Group& world) {
    for (const auto kind : kKinds) {
      TwoParams params(world, kind);
      const c10::StorageImpl* storage = params.bundle->storage();
      params.gather();
      const at::Tensor view = params.full(0);
      params.free();
      EXPECT_EQ(storage_of(view)->nbytes(), 0U);
      params.bundle->shard().add_(1);
      params.gather();
      EXPECT_EQ(storage_of(view), storage);
      EXPECT_TRUE(torch::equal(view, params.values[0] + 1));
      params.free();
    }
  });
}

TEST(BundleTest, NobodySeesAGatherThatIsNotFinished) {
  on_ranks(2, [](const Group& world) {
    for (const auto kind : kKinds) {
      TwoParams params(world, kind);
      params.free();
      params.bundle->start_gather("gather", 0);
      EXPECT_EQ(params.bundle->storage()->nbytes(), 0U);
      EXPECT_GT(params.bundle->full_bytes_now(), 0U); // on its way
      params.bundle->finish_gather();
      EXPECT_EQ(
          params.bundle->storage()->nbytes(), params.bundle->full().nbytes());
      EXPECT_EQ(
          params.bundle->full_bytes_now(), params.bundle->full().nbytes());
      params.free();
      EXPECT_EQ(params.bundle->full_bytes_now(), 0U);
    }
  });
}

#if TESSERA_TORCH_AT_LEAST(2, 13)
TEST(BundleTest, RawAccessToAFreedBufferThrowsTheReason) {
  on_ranks(2, [](const Group& world) {
    TwoParams params(world, Layout::Kind::Flat);
    params.gather();
    EXPECT_NE(params.bundle->full().const_data_ptr(), nullptr);
    params.free();
    EXPECT_THAT(
        error_of([&] { params.bundle->full().const_data_ptr(); }),
        HasSubstr("it was freed"));
    params.gather(); // and the reason is forgotten
    EXPECT_NE(params.bundle->full().const_data_ptr(), nullptr);
    params.free();
  });
}
#endif

TEST(BundleTest, FreedBytesServeTheNextGather) {
  on_ranks(2, [](const Group& world) {
    TwoParams params(world, Layout::Kind::Flat);
    params.gather();
    const void* bytes = params.bundle->full().const_data_ptr();
    params.free();
    EXPECT_EQ(params.idle_buffers(), 1U);
    params.gather();
    EXPECT_EQ(params.idle_buffers(), 0U);
    EXPECT_EQ(params.bundle->full().const_data_ptr(), bytes);
    params.free();
  });
}

TEST(BundleTest, ARankAloneShowsTheShardItself) {
  on_ranks(1, [](const Group& world) {
    TwoParams params(world, Layout::Kind::Flat);
    EXPECT_TRUE(params.bundle->shows_shard());
    params.gather();
    EXPECT_EQ(
        params.bundle->full().const_data_ptr(),
        params.bundle->shard().const_data_ptr());
    EXPECT_EQ(params.bundle->full_bytes_now(), 0U); // none beside the shard's
    params.free();
    EXPECT_EQ(params.idle_buffers(), 0U); // the bytes are still the shard's
    EXPECT_TRUE(torch::equal(
        params.in_shard(params.bundle->shard(), 1, 0), params.values[1]));
  });
}

TEST(BundleTest, FullParametersHaveTheComputeDtype) {
  on_ranks(2, [](const Group& world) {
    for (const bool is_alone : {false, true}) {
      const Group shard = is_alone ? alone(world) : world;
      TwoParams params(
          Groups{.all = shard, .shard = shard}, {.param_dtype = at::kBFloat16});
      EXPECT_FALSE(params.bundle->shows_shard());
      params.gather();
      EXPECT_EQ(params.full(0).scalar_type(), at::kBFloat16);
      EXPECT_TRUE(
          torch::equal(params.full(0), params.values[0].to(at::kBFloat16)));
      EXPECT_EQ(params.bundle->shard().scalar_type(), at::kFloat);
      params.free();
    }
  });
}

TEST(BundleTest, AGatherOfACopyLeavesTheFullBufferAlone) {
  on_ranks(3, [](const Group& world) {
    for (const auto kind : kKinds) {
      TwoParams params(world, kind);
      params.free();
      const at::Tensor doubled =
          params.bundle->gather_copy(params.bundle->shard() * 2, "copy");
      for (size_t index = 0; index < 2; ++index) {
        EXPECT_TRUE(torch::equal(
            params.view(doubled, index), params.values[index] * 2));
      }
      EXPECT_EQ(params.bundle->storage()->nbytes(), 0U);
    }
  });
}

/// Values whose bits a floating-point sum with zeros may change.
at::Tensor delicate_values() {
  return torch::tensor(
             {std::bit_cast<int32_t>(-0.0F),
              int32_t{0x7fc12345}, // a NaN with a payload
              int32_t{1}}, // the smallest number
             at::kInt)
      .view(at::kFloat);
}

TEST(BundleTest, WholeParametersThatTravelAsASumKeepEveryBit) {
  on_ranks(3, [](const Group& world) {
    TwoParams params(world, Layout::Kind::Dim0);
    ASSERT_EQ(params.bundle->layout().travel(), Layout::Travel::Whole);
    if (world.rank() == 0) { // of the second row, which is the first rank's
      params.bundle->shard().narrow(0, 3, 3).copy_(delicate_values());
    }
    const at::Tensor expected = delicate_values().view(at::kInt);
    params.gather();
    EXPECT_TRUE(torch::equal(params.full(0)[1].view(at::kInt), expected));
    params.free();
    const at::Tensor copy =
        params.bundle->gather_copy(params.bundle->shard(), "copy");
    EXPECT_TRUE(torch::equal(params.view(copy, 0)[1].view(at::kInt), expected));
  });
}

TEST(BundleTest, WholeParametersTravelInTheComputeDtype) {
  on_ranks(3, [](const Group& world) {
    for (const auto dtype : {at::kBFloat16, at::kDouble}) {
      TwoParams params(
          Groups{.all = world, .shard = world},
          {.layout = Layout::Kind::Dim0, .param_dtype = dtype});
      ASSERT_EQ(params.bundle->layout().travel(), Layout::Travel::Whole);
      params.gather();
      for (size_t index = 0; index < 2; ++index) {
        EXPECT_TRUE(
            torch::equal(params.full(index), params.values[index].to(dtype)));
      }
      params.free();
      EXPECT_EQ(params.idle_buffers(), 1U); // moved, not copied
    }
  });
}

TEST(BundleTest, SettlingForgetsAGather) {
  on_ranks(2, [](const Group& world) {
    TwoParams params(world, Layout::Kind::Flat);
    params.bundle->start_gather("gather", 0);
    params.bundle->settle();
    EXPECT_EQ(params.bundle->full_bytes_now(), 0U);
    params.gather();
    EXPECT_TRUE(torch::equal(params.full(0), params.values[0]));
    params.free();
  });
}

TEST(BundleGradientsTest, EachRankGetsItsPartOfTheAverage) {
  on_ranks(3, [](const Group& world) {
    for (const auto kind : kKinds) {
      TwoParams params(world, kind);
      const at::Tensor gradient = params.values[0] * (world.rank() + 1);
      params.bundle->gradients().add({gradient, torch::ones(4)}, {true, true});
      const auto [mean, used] = params.reduce();
      EXPECT_EQ(used, (std::vector<bool>{true, true}));
      EXPECT_TRUE(torch::allclose(
          params.in_shard(mean, 0, world.rank()),
          params.part(params.values[0] * 2, 0, world.rank())));
      EXPECT_TRUE(torch::equal(
          params.in_shard(mean, 1, world.rank()),
          params.part(torch::ones(4), 1, world.rank())));
    }
  });
}

TEST(
    BundleGradientsTest,
    OfWholeParametersAreAddedAndAveragedInTheReduceDtype) {
  on_ranks(3, [](const Group& world) {
    TwoParams params(
        Groups{.all = world, .shard = world},
        {.layout = Layout::Kind::Dim0, .reduce_dtype = at::kBFloat16});
    ASSERT_EQ(params.bundle->layout().travel(), Layout::Travel::Whole);
    params.add_gradients(7, 7); // what the pool has idle is not zero
    params.reduce();
    params.add_gradients(1 + 1e-4, 1); // bfloat16 has no such number
    params.bundle->gradients().add(
        {torch::full({5, 3}, 2.),
         world.rank() == 2 ? torch::full({4}, 3.) : at::Tensor()},
        {true, true});
    const at::Tensor mean = params.reduce().mean;
    EXPECT_EQ(mean.scalar_type(), at::kFloat);
    EXPECT_EQ(mean.numel(), params.bundle->layout().shard_numel());
    EXPECT_TRUE(torch::equal(
        params.in_shard(mean, 0, world.rank()),
        params.part(torch::full({5, 3}, 3.), 0, world.rank())));
    EXPECT_TRUE(torch::equal(
        params.in_shard(mean, 1, world.rank()),
        params.part(torch::full({4}, 2.), 1, world.rank())));
    EXPECT_EQ(params.bundle->gradients().bytes_now(), 0U);
  });
}

TEST(BundleGradientsTest, AnAbsentGradientCountsAsZeros) {
  on_ranks(2, [](const Group& world) {
    for (const auto kind : kKinds) {
      TwoParams params(world, kind);
      params.add_gradients(7, 7); // what the pool has idle is not zero
      params.reduce();
      const bool has_one = world.rank() == 0;
      params.bundle->gradients().add(
          {torch::ones({5, 3}), has_one ? torch::ones(4) : at::Tensor()},
          {true, true});
      const auto [mean, used] = params.reduce();
      EXPECT_EQ(used, (std::vector<bool>{true, has_one}));
      EXPECT_TRUE(torch::equal(
          params.in_shard(mean, 1, world.rank()),
          params.part(torch::full({4}, 0.5), 1, world.rank())));
    }
  });
}

TEST(BundleGradientsTest, AFrozenParameterGetsZeros) {
  on_ranks(2, [](const Group& world) {
    TwoParams params(world, Layout::Kind::Flat);
    params.bundle->gradients().add(
        {torch::ones({5, 3}), torch::ones(4)}, {true, false});
    const auto [mean, used] = params.reduce();
    EXPECT_EQ(used, (std::vector<bool>{true, false}));
    EXPECT_EQ(
        params.in_shard(mean, 1, world.rank()).abs().sum().item<float>(), 0);
  });
}

TEST(BundleGradientsTest, GradientsThatWaitAreAdded) {
  on_ranks(2, [](const Group& world) {
    TwoParams params(world, Layout::Kind::Dim0);
    BundleGradients& gradients = params.bundle->gradients();
    EXPECT_FALSE(gradients.has_waiting(true));
    params.add_gradients(1, 10);
    params.add_gradients(2, 20);
    EXPECT_TRUE(gradients.has_waiting(true));
    const at::Tensor mean = params.reduce().mean;
    EXPECT_FALSE(gradients.has_waiting(true));
    EXPECT_EQ(gradients.bytes_now(), 0U);
    EXPECT_TRUE(torch::equal(
        params.in_shard(mean, 0, world.rank()),
        params.part(torch::full({5, 3}, 3.), 0, world.rank())));
  });
}

TEST(BundleGradientsTest, AreAveragedInTheReduceDtype) {
  on_ranks(2, [](const Group& world) {
    TwoParams params(
        Groups{.all = world, .shard = world}, {.reduce_dtype = at::kBFloat16});
    EXPECT_EQ(params.bundle->gradients().reduce_dtype(), at::kBFloat16);
    params.add_gradients(1 + 1e-4, 1); // bfloat16 has no such number
    const at::Tensor mean = params.reduce().mean;
    EXPECT_EQ(mean.scalar_type(), at::kFloat);
    EXPECT_TRUE(torch::equal(
        params.in_shard(mean, 0, world.rank()),
        params.part(torch::ones({5, 3}), 0, world.rank())));
  });
}

TEST(BundleGradientsTest, ADroppedReductionLeavesNothing) {
  on_ranks(2, [](const Group& world) {
    TwoParams params(world, Layout::Kind::Flat);
    BundleGradients& gradients = params.bundle->gradients();
    params.add_gradients(100, 100);
    gradients.start_reduction(/*all_reduce=*/true, "reduce");
    EXPECT_TRUE(gradients.is_reducing());
    gradients.drop_reduction();
    EXPECT_FALSE(gradients.is_reducing());
    EXPECT_EQ(gradients.bytes_now(), 0U);
    gradients.add({torch::ones({5, 3}), at::Tensor()}, {true, true});
    const auto [mean, used] = params.reduce();
    EXPECT_EQ(used, (std::vector<bool>{true, false}));
    EXPECT_TRUE(torch::equal(
        params.in_shard(mean, 0, world.rank()),
        params.part(torch::ones({5, 3}), 0, world.rank())));
  });
}

TEST(BundleGradientsTest, WaitForTheAllReduceThatWasLeftOut) {
  on_ranks(2, [](const Group& world) {
    // Two copies of the parameters, one on each rank.
    const Group mine = alone(world);
    TwoParams params(
        Groups{.all = world, .shard = mine, .replicate = world}, {});
    BundleGradients& gradients = params.bundle->gradients();
    params.add_gradients(world.rank(), 1);
    EXPECT_FALSE(params.reduce(/*all_reduce=*/false).mean.defined());
    EXPECT_FALSE(gradients.has_waiting(/*all_reduce=*/false));
    EXPECT_TRUE(gradients.has_waiting(/*all_reduce=*/true));
    params.add_gradients(10, 1);
    const at::Tensor mean = params.reduce().mean;
    EXPECT_TRUE(
        torch::equal(params.in_shard(mean, 0, 0), torch::full({15}, 10.5)));
    EXPECT_FALSE(gradients.has_waiting(/*all_reduce=*/true));
  });
}

} // namespace
} // namespace tessera::engine
