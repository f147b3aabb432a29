// An input that does not fit, on one rank of several or on all.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/error.h>
#include <tessera/exported/exported.h>
#include <tessera/fsdp/fully_shard.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "exported/cases.h"

namespace tessera {
namespace {

using testing::exported_case;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::on_ranks;

constexpr const char* kWhy =
    "the input \"x\" is a float32 tensor of shape [5, 7], but the model was exported with a float32 tensor of shape [5, 6].";
constexpr const char* kGivenUp = "has given up the groups of the model";

at::Tensor fitting() {
  return torch::ones({5, 6});
}
at::Tensor not_fitting() {
  return torch::ones({5, 7});
}

/// The text of an E that `body` throws.
template <class E, class Body>
std::string text_of(const Body& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another kind of error: ") + error.what();
  }
  return "nothing was thrown";
}

class ExportedRefusedInputsTest
    : public testing::ExportedCases,
      public ::testing::WithParamInterface<const char*> {
 protected:
  static void on_two_ranks(const std::function<void(const Group&)>& body) {
    on_ranks({.size = 2, .backend = GetParam()}, body);
  }
  /// Over a group of its own: the end of on_ranks() uses the world.
  static Exported sharded(
      const Group& world,
      FullyShardOptions options = FullyShardOptions()) {
    auto model = load_exported(exported_case("mlp"));
    fully_shard(model, options.group(world.subgroup({0, 1}, "model")));
    return model;
  }
};

TEST_P(ExportedRefusedInputsTest, OfOneRankEndTheForwardOfAll) {
  on_two_ranks([](const Group& world) {
    auto model = sharded(world);
    model->forward(fitting()).sum().backward();
    if (world.rank() == 1) {
      const auto text =
          text_of<c10::ValueError>([&] { model->forward(not_fitting()); });
      EXPECT_THAT(text, HasSubstr(kWhy));
      EXPECT_THAT(text, HasSubstr(kGivenUp));
    } else {
      const auto text =
          text_of<PeerLostError>([&] { model->forward(fitting()); });
      EXPECT_THAT(text, HasSubstr("rank 1 gave this group up"));
      EXPECT_THAT(text, HasSubstr(kWhy));
    }
    EXPECT_THAT(
        text_of<PeerLostError>([&] { model->forward(fitting()); }),
        HasSubstr(kWhy));
  });
}

TEST_P(ExportedRefusedInputsTest, OfAllRanksLeaveTheModelAsItWas) {
  on_two_ranks([](const Group& world) {
    auto model = sharded(world);
    const at::Tensor before = model->forward(fitting());
    before.sum().backward();
    for (int time = 0; time < 2; ++time) {
      const auto text =
          text_of<c10::ValueError>([&] { model->forward(not_fitting()); });
      EXPECT_THAT(text, HasSubstr(kWhy));
      EXPECT_THAT(text, Not(HasSubstr(kGivenUp)));
    }
    EXPECT_TRUE(torch::equal(model->forward(fitting()), before));
    const at::Tensor sum = torch::ones({1});
    world.all_reduce(sum);
    EXPECT_EQ(sum.item<float>(), 2);
  });
}

TEST_P(ExportedRefusedInputsTest, AreNotPairedWithAnotherBatch) {
  on_two_ranks([](const Group& world) {
    // A forward makes no collective here once the parameters are gathered: the
    // peer finds out in its backward.
    auto model =
        sharded(world, FullyShardOptions().reshard_after_forward(false));
    (void)model->forward(fitting());
    if (world.rank() == 1) {
      EXPECT_THAT(
          text_of<c10::ValueError>([&] { model->forward(not_fitting()); }),
          HasSubstr(kGivenUp));
    }
    EXPECT_THAT(
        text_of<PeerLostError>(
            [&] { model->forward(fitting()).sum().backward(); }),
        HasSubstr(kWhy));
  });
}

TEST_P(ExportedRefusedInputsTest, OfTwoForwardsAreNotTakenForOne) {
  on_two_ranks([](const Group& world) {
    auto model =
        sharded(world, FullyShardOptions().reshard_after_forward(false));
    (void)model->forward(fitting());
    if (world.rank() == 1) { // one forward more than the other rank
      (void)model->forward(fitting());
    }
    EXPECT_THAT(
        text_of<c10::ValueError>([&] { model->forward(not_fitting()); }),
        HasSubstr(kGivenUp));
  });
}

TEST_P(ExportedRefusedInputsTest, OfAModelThatIsNotShardedConcernOneRank) {
  on_two_ranks([](const Group& world) {
    auto model = load_exported(exported_case("mlp"));
    if (world.rank() == 1) {
      const auto text =
          text_of<c10::ValueError>([&] { model->forward(not_fitting()); });
      EXPECT_THAT(text, HasSubstr(kWhy));
      EXPECT_THAT(text, Not(HasSubstr(kGivenUp)));
    }
    (void)model->forward(fitting());
    world.barrier();
  });
}

/// Copies of a model, over a group of their own.
struct Copies {
  explicit Copies(const Group& world)
      : model(load_exported(exported_case("mlp"))),
        ddp(model,
            DDPOptions().process_group(world.subgroup({0, 1}, "copies"))) {}

  at::Tensor loss(const at::Tensor& input) {
    return ddp(input).sum();
  }

  Exported model;
  DistributedDataParallel<ExportedImpl> ddp;
};

TEST_P(ExportedRefusedInputsTest, OfOneRankEndTheStepOfAllCopies) {
  on_two_ranks([](const Group& world) {
    Copies copies(world);
    copies.loss(fitting()).backward();
    if (world.rank() == 1) {
      const auto text =
          text_of<c10::ValueError>([&] { copies.loss(not_fitting()); });
      EXPECT_THAT(text, HasSubstr(kWhy));
      EXPECT_THAT(text, HasSubstr(kGivenUp));
    } else {
      const at::Tensor loss = copies.loss(fitting());
      const auto text = text_of<PeerLostError>([&] { loss.backward(); });
      EXPECT_THAT(text, HasSubstr("rank 1 gave this group up"));
      EXPECT_THAT(text, HasSubstr(kWhy));
    }
  });
}

TEST_P(ExportedRefusedInputsTest, OfAllRanksLeaveTheCopiesAsTheyWere) {
  on_two_ranks([](const Group& world) {
    Copies copies(world);
    {
      const torch::NoGradGuard evaluates; // on one rank only
      if (world.rank() == 0) {
        (void)copies.model->forward(fitting());
      }
    }
    for (int time = 0; time < 2; ++time) {
      const auto text =
          text_of<c10::ValueError>([&] { copies.loss(not_fitting()); });
      EXPECT_THAT(text, HasSubstr(kWhy));
      EXPECT_THAT(text, Not(HasSubstr(kGivenUp)));
    }
    copies.loss((world.rank() + 1) * fitting()).backward();
    const at::Tensor mine = copies.model->parameters().front().grad();
    const at::Tensor sum = mine.clone();
    world.all_reduce(sum);
    EXPECT_TRUE(torch::equal(sum, 2 * mine)); // both have the average
  });
}

TEST_P(ExportedRefusedInputsTest, OfCopiesThatDoNotReduceConcernOneRank) {
  on_two_ranks([](const Group& world) {
    Copies copies(world);
    const auto refuse_alone = [&] {
      if (world.rank() == 1) {
        const auto text = text_of<c10::ValueError>(
            [&] { copies.model->forward(not_fitting()); });
        EXPECT_THAT(text, HasSubstr(kWhy));
        EXPECT_THAT(text, Not(HasSubstr(kGivenUp)));
      }
    };
    {
      const auto accumulates = copies.ddp.no_sync();
      refuse_alone();
    }
    {
      const torch::NoGradGuard evaluates;
      refuse_alone();
    }
    copies.loss(fitting()).backward();
    world.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ExportedRefusedInputsTest,
    ::testing::Values("shm", "gloo"),
    [](const auto& each) { return std::string(each.param); });

} // namespace
} // namespace tessera
