// Deferred weights: each rank reads what its shards hold, and nothing else.
#include <tessera/deferred/deferred_init.h>
#include <tessera/engine/parameters.h>
#include <tessera/error.h>
#include <tessera/exported/units.h>
#include <tessera/fsdp/fully_shard.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "exported/cases.h"
#include "exported/payload_file.h"
#include "support/errors.h"

namespace tessera {
namespace {

using exported::testing::payload_bytes_read;
using testing::error_of;
using testing::exported_case;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::on_ranks;
using testing::Reference;

/// What fully_shard() made of a model, and how many bytes of the archive it
/// read.
struct Sharded {
  Exported model{nullptr};
  uint64_t bytes_read = 0;
};

using Change = std::function<void(Exported&)>;

Sharded shard_deferred(
    const std::filesystem::path& path,
    const FullyShardOptions& options,
    const Change& change = {}) {
  Sharded result;
  result.model = load_exported(path, ExportedOptions().deferred(true));
  if (change) {
    change(result.model);
  }
  const uint64_t before = payload_bytes_read();
  fully_shard(result.model, options);
  result.bytes_read = payload_bytes_read() - before;
  return result;
}

Exported shard_plain(
    const std::filesystem::path& path,
    const FullyShardOptions& options,
    const Change& change = {}) {
  auto model = load_exported(path);
  if (change) {
    change(model);
  }
  fully_shard(model, options);
  return model;
}

/// The bytes of this rank's shards; buffers are whole on every rank.
uint64_t held_bytes(Exported& model) {
  uint64_t result = 0;
  for (const auto& [name, shard] : named_parameters(model)) {
    result += shard.nbytes();
  }
  for (const at::Tensor& buffer : model->buffers()) {
    result += buffer.nbytes();
  }
  return result;
}

void expect_equal_shards(Exported& found, Exported& wanted) {
  const auto shards = named_parameters(found);
  const auto others = named_parameters(wanted);
  ASSERT_EQ(shards.size(), others.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    EXPECT_EQ(shards[i].first, others[i].first);
    EXPECT_TRUE(torch::equal(shards[i].second, others[i].second))
        << shards[i].first;
  }
}

struct DeferredTrial {
  int size;
  ShardLayout layout;
};

class ExportedDeferredTest
    : public testing::ExportedCases,
      public ::testing::WithParamInterface<DeferredTrial> {
 protected:
  static FullyShardOptions options() {
    return FullyShardOptions().layout(GetParam().layout);
  }
};

TEST_P(ExportedDeferredTest, ARankReadsTheElementsOfItsShardsAndNoOthers) {
  const auto path = exported_case("rotary_steps");
  on_ranks(GetParam().size, [&](const Group&) {
    auto deferred = shard_deferred(path, options());
    auto plain = shard_plain(path, options());
    expect_equal_shards(deferred.model, plain);
    EXPECT_EQ(deferred.bytes_read, held_bytes(deferred.model));
    const Reference reference("rotary_steps");
    EXPECT_TRUE(torch::equal(
        loss_of(deferred.model->forward(reference.args())),
        loss_of(plain->forward(reference.args()))));
  });
}

TEST_P(ExportedDeferredTest, OfAStridedWeightOnlyWhatTheWeightSpansIsRead) {
  const auto path = exported_case("views");
  on_ranks(GetParam().size, [&](const Group&) {
    auto deferred = shard_deferred(path, options());
    auto plain = shard_plain(path, options());
    expect_equal_shards(deferred.model, plain);
    // "across" is a transposed 5 x 6 tensor. "part" lies in a storage of 40
    // elements, with an offset, but its elements are in order.
    const uint64_t held = held_bytes(deferred.model);
    uint64_t across = 0;
    for (const auto& [name, shard] : named_parameters(deferred.model)) {
      across += name == "across" ? shard.nbytes() : 0;
    }
    EXPECT_EQ(deferred.bytes_read, held - across + 5 * 6 * sizeof(float));
  });
}

TEST_P(ExportedDeferredTest, AConversionIsDoneToThePartThatIsRead) {
  const auto path = exported_case("rotary_steps"); // in double
  const auto to_float = [](Exported& model) { model->to(torch::kFloat); };
  on_ranks(GetParam().size, [&](const Group&) {
    auto deferred = shard_deferred(path, options(), to_float);
    auto plain = shard_plain(path, options(), to_float);
    expect_equal_shards(deferred.model, plain);
    EXPECT_EQ(deferred.model->parameters().front().dtype(), torch::kFloat);
    EXPECT_EQ(deferred.bytes_read, 2 * held_bytes(deferred.model));
  });
}

TEST_P(ExportedDeferredTest, AWeightThatWasChangedSinceHasTheChange) {
  const auto path = exported_case("rotary_steps");
  const auto change = [](Exported& model) {
    const at::NoGradGuard no_grad;
    model->named_parameters()["norm.weight"].mul_(3);
    model->module_at("layers.1")->to(torch::kFloat);
    for (at::Tensor parameter : model->module_at("layers.1")->parameters()) {
      parameter.add_(1);
    }
  };
  on_ranks(GetParam().size, [&](const Group&) {
    auto deferred = shard_deferred(path, options(), change);
    auto plain = shard_plain(path, options(), change);
    expect_equal_shards(deferred.model, plain);
  });
}

/// A copy of a case in which the directory has another checksum for every
/// weight, and the weights have other values, if asked for.
std::filesystem::path copy_with_checksum(
    const std::string& name,
    const std::string& copy_name,
    uint32_t checksum,
    bool changes_values) {
  const auto copy = exported_case(copy_name);
  if (testing::in_worker()) { // the controller has made it
    return copy;
  }
  std::ifstream input(exported_case(name), std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(input), {});
  const std::string entry = "PK\x01\x02";
  size_t num_weights = 0;
  for (size_t at = bytes.find(entry); at != bytes.npos;
       at = bytes.find(entry, at + 1)) {
    uint16_t name_bytes = 0;
    uint32_t local = 0;
    std::memcpy(&name_bytes, &bytes[at + 28], sizeof name_bytes);
    std::memcpy(&local, &bytes[at + 42], sizeof local);
    const std::string entry_name = bytes.substr(at + 46, name_bytes);
    if (entry_name.find("/weights/weight_") == entry_name.npos) {
      continue;
    }
    ++num_weights;
    std::memcpy(&bytes[at + 16], &checksum, sizeof checksum);
    uint16_t extra_bytes = 0;
    std::memcpy(&extra_bytes, &bytes[local + 28], sizeof extra_bytes);
    if (changes_values) {
      bytes[local + 30 + name_bytes + extra_bytes] ^= 1;
    }
  }
  EXPECT_GT(num_weights, 0U);
  std::ofstream(copy, std::ios::binary) << bytes;
  return copy;
}

TEST_P(ExportedDeferredTest, RanksThatReadDifferentArchivesAreTold) {
  const auto path = exported_case("rotary_steps");
  const auto other =
      copy_with_checksum("rotary_steps", "rotary_other_weights", 4711, true);
  on_ranks(GetParam().size, [&](const Group& world) {
    auto deferred = shard_deferred(world.rank() == 1 ? other : path, options());
    const Reference reference("rotary_steps");
    EXPECT_THAT(
        error_of([&] { deferred.model->forward(reference.args()); }),
        HasSubstr("rank 1 began with other values than rank 0"));
  });
}

TEST_P(ExportedDeferredTest, WithoutChecksumsTheValuesThemselvesAreCompared) {
  const auto path = exported_case("rotary_steps");
  const auto same =
      copy_with_checksum("rotary_steps", "rotary_no_checksums", 0, false);
  const auto other =
      copy_with_checksum("rotary_steps", "rotary_no_checksums_other", 0, true);
  on_ranks(GetParam().size, [&](const Group& world) {
    const Reference reference("rotary_steps");
    auto equal = shard_deferred(same, options());
    auto plain = shard_plain(path, options());
    expect_equal_shards(equal.model, plain);
    EXPECT_TRUE(torch::equal(
        loss_of(equal.model->forward(reference.args())),
        loss_of(plain->forward(reference.args()))));
    auto different =
        shard_deferred(world.rank() == 1 ? other : same, options());
    EXPECT_THAT(
        error_of([&] { different.model->forward(reference.args()); }),
        HasSubstr("rank 1 began with other values than rank 0"));
    auto uncompared = shard_deferred(same, options().compare_start(false));
    EXPECT_EQ(uncompared.bytes_read, held_bytes(uncompared.model));
  });
}

TEST_P(ExportedDeferredTest, AFileThatIsGoneOnOneRankFailsOnAll) {
  const auto path = exported_case("rotary_steps");
  on_ranks(GetParam().size, [&](const Group& world) {
    const auto copy = std::filesystem::temp_directory_path() /
        ("tessera_gone_" + std::to_string(getpid()) + ".pt2");
    std::filesystem::copy_file(path, copy);
    auto model = load_exported(copy, ExportedOptions().deferred(true));
    if (world.rank() == 1) {
      std::filesystem::remove(copy);
    }
    EXPECT_THAT(
        error_of([&] { fully_shard(model, options()); }),
        ::testing::AllOf(
            HasSubstr("rank 1 failed: "),
            HasSubstr("tessera_gone_"),
            HasSubstr("make it again before the next attempt")));
    std::filesystem::remove(copy);
    auto again = shard_deferred(path, options()); // the ranks are together
    auto plain = shard_plain(path, options());
    expect_equal_shards(again.model, plain);
    const Reference reference("rotary_steps");
    EXPECT_TRUE(torch::equal(
        loss_of(again.model->forward(reference.args())),
        loss_of(plain->forward(reference.args()))));
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ExportedDeferredTest,
    ::testing::Values(
        DeferredTrial{2, ShardLayout::Flat},
        DeferredTrial{2, ShardLayout::Dim0},
        DeferredTrial{4, ShardLayout::Flat},
        DeferredTrial{4, ShardLayout::Dim0}),
    [](const auto& each) {
      return std::string(
                 each.param.layout == ShardLayout::Flat ? "Flat" : "Dim0") +
          "_" + std::to_string(each.param.size);
    });

} // namespace
} // namespace tessera
