#include <tessera/train/metrics.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "comm/diagnostics/observer.h"
#include "support/device.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST(MetricsTest, CombinesUnevenRanks) {
  on_ranks(3, [](const Group& world) {
    Metrics metrics;
    for (int round = 0; round < 2; ++round) { // reduce() begins anew
      // Rank r has r batches, of 1, 2, ... samples; rank 0 has none.
      for (int i = 1; i <= world.rank(); ++i) {
        const auto loss =
            torch::full({}, 10.0f * world.rank() + i).to(test_device());
        metrics.mean("loss", loss, i);
        metrics.mean("by batch", 10.0 * world.rank() + i);
        metrics.sum("correct", torch::full({1}, i).to(test_device()));
        metrics.count("samples", i);
        metrics.count("batches");
        metrics.min("least", loss);
        metrics.max("most", loss);
      }
      EXPECT_THAT(
          metrics.reduce(),
          ElementsAre(
              Pair("batches", 3),
              Pair("by batch", (11.0 + 21.0 + 22.0) / 3),
              Pair("correct", 4),
              Pair("least", 11),
              Pair("loss", (11.0 + 21.0 + 2 * 22.0) / 4),
              Pair("most", 22),
              Pair("samples", 4)));
    }
    EXPECT_TRUE(metrics.reduce().empty());
  });
}

TEST(MetricsTest, IssuesExactlyTheExchangeOfBytes) {
  on_ranks(2, [](const Group&) {
    Metrics metrics;
    int starts = 0;
    const comm::CallWatch watch([&](const comm::CallEvent& event) {
      starts += event.kind == comm::CallEvent::Kind::Starts;
    });
    metrics.sum("a", 1);
    metrics.mean("b", torch::ones({}), 3);
    metrics.max("c", 2);
    EXPECT_EQ(starts, 0);
    metrics.reduce();
    const int with_three = starts;
    metrics.sum("a", 1);
    metrics.reduce();
    EXPECT_EQ(starts, 2 * with_three);
    EXPECT_LE(with_three, 2); // lengths, then bytes
  });
}

TEST(MetricsTest, KindsKeepTheirValues) {
  Metrics metrics; // no world: this process alone
  metrics.mean("mean", 3, 2);
  metrics.mean("mean", torch::full({}, 9.0), 1);
  metrics.sum("sum", 0.5);
  metrics.sum("sum", torch::full({1, 1}, 2, torch::kLong));
  metrics.min("min", 4);
  metrics.min("min", torch::full({}, -4.0));
  metrics.max("max", -4);
  metrics.max("max", -5);
  EXPECT_THAT(
      metrics.reduce(),
      ElementsAre(
          Pair("max", -4), Pair("mean", 5), Pair("min", -4), Pair("sum", 2.5)));
}

TEST(MetricsTest, SumsInDouble) {
  Metrics metrics;
  for (int i = 0; i < 1000; ++i) {
    metrics.sum("sum", torch::full({}, 1e8f + 8));
  }
  metrics.count("large", int64_t{1} << 52);
  metrics.count("large");
  EXPECT_THAT(
      metrics.reduce(),
      ElementsAre(
          Pair("large", std::pow(2.0, 52) + 1), Pair("sum", 1000 * (1e8 + 8))));
}

TEST(MetricsTest, NanIsSeen) {
  on_ranks(2, [](const Group& world) {
    Metrics metrics;
    metrics.max("host", world.rank() == 0 ? NAN : 5.0);
    metrics.min("device", torch::full({}, world.rank() == 0 ? NAN : 5.0));
    metrics.mean("nothing", NAN, 0);
    metrics.mean("skipped", world.rank() == 0 ? NAN : 5.0, world.rank());
    const auto all = metrics.reduce();
    EXPECT_TRUE(std::isnan(all.at("host")));
    EXPECT_TRUE(std::isnan(all.at("device")));
    EXPECT_TRUE(std::isnan(all.at("nothing")));
    EXPECT_EQ(all.at("skipped"), 5);
  });
}

TEST(MetricsTest, KeepsNoGraph) {
  Metrics metrics;
  const auto weight = torch::ones({4}).requires_grad_();
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> saved =
      [&] {
        const auto hidden = weight * 2;
        metrics.mean("loss", (hidden * hidden).sum(), 4);
        return c10::
            weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                hidden.getIntrusivePtr());
      }();
  EXPECT_TRUE(saved.expired());
  EXPECT_EQ(metrics.reduce().at("loss"), 16);
}

TEST(MetricsTest, RejectsMistakesOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    Metrics metrics;
    if (world.rank() == 1) {
      metrics.sum("wide", torch::ones({3}));
    }
    metrics.sum("good", 1);
    EXPECT_THAT(
        error_of([&] { metrics.reduce(); }),
        AllOf(
            HasSubstr("[Metrics::reduce] rank 1, metric \"wide\""),
            HasSubstr("a tensor of 3 elements")));
    if (world.rank() == 1) {
      metrics.mean("none", at::Tensor(), 8);
    }
    EXPECT_THAT(
        error_of([&] { metrics.reduce(); }),
        HasSubstr("metric \"none\": a tensor that is not defined"));
    metrics.sum("loss", 1);
    if (world.rank() == 1) {
      metrics.mean("loss", 1);
    }
    EXPECT_THAT(
        error_of([&] { metrics.reduce(); }),
        HasSubstr("rank 1, metric \"loss\": it is a sum and a mean"));
    if (world.rank() == 0) {
      metrics.max("norm", 1);
    } else {
      metrics.min("norm", 1);
    }
    EXPECT_THAT(
        error_of([&] { metrics.reduce(); }),
        HasSubstr("\"norm\": it is a max on rank 0 and a min on rank 1"));
    metrics.mean("loss", 1, world.rank() == 0 ? -1 : 1);
    EXPECT_THAT(
        error_of([&] { metrics.reduce(); }),
        HasSubstr("rank 0, metric \"loss\": its count is -1"));
    // Nothing is left over.
    metrics.sum("loss", 1);
    EXPECT_THAT(metrics.reduce(), ElementsAre(Pair("loss", 2)));
  });
}

TEST(MetricsTest, OfASubgroup) {
  on_ranks(3, [](const Group& world) {
    const auto pair = world.split(world.rank() == 2 ? 1 : 0);
    Metrics metrics(*pair);
    metrics.sum("ranks", 1);
    EXPECT_EQ(metrics.reduce().at("ranks"), world.rank() == 2 ? 1 : 2);
  });
}

} // namespace
} // namespace tessera
