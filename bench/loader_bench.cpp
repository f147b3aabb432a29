// What reading costs a training step: the GPT of step_bench, sharded, on
// batches of a loader over a token file, and on one batch that stays where it
// is. The two take turns, some steps at a time.
//
//   tessera run -n 2 loader_bench [tiny|124M|774M] [cpu|cuda]
#include <tessera/tessera.h>

#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "gpt.h"
#include "harness.h"
#include "setting.h"

namespace {

namespace data = tessera::data;
namespace fs = std::filesystem;

constexpr int kWarmUp = 5;
constexpr int kRounds = 12;
constexpr int kStepsPerTurn = 8;
constexpr int64_t kTokens = 1 << 22;

/// Tokens without sense, in a file of this rank that is removed at the end.
class Tokens {
 public:
  Tokens(int64_t vocabulary, int rank)
      : path_(
            fs::temp_directory_path() /
            ("loader_bench_" + std::to_string(::getpid()) + "_" +
             std::to_string(rank) + ".tokens")) {
    const auto tokens = torch::randint(0, vocabulary, {kTokens}, torch::kLong);
    data::TokenFileWriter writer(path_, vocabulary);
    writer.append(std::span<const int64_t>(
        tokens.const_data_ptr<int64_t>(), static_cast<size_t>(kTokens)));
    writer.close();
  }
  ~Tokens() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;

  data::TokenFile open() const {
    return data::TokenFile(path_);
  }

 private:
  fs::path path_;
};

class Trainer {
 public:
  explicit Trainer(const bench::Setting& setting) {
    torch::manual_seed(0);
    model_ = bench::Gpt(setting.config);
    model_->to(setting.device);
    for (const auto& block : *model_->blocks) {
      tessera::fully_shard(block);
    }
    tessera::fully_shard(model_);
    optimizer_ = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(model_), 1e-4);
  }

  void step(const data::TokenBatch& batch) {
    const auto logits = model_->forward(batch.inputs);
    torch::cross_entropy_loss(
        logits.view({-1, logits.size(-1)}), batch.targets.view({-1}))
        .backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

 private:
  bench::Gpt model_{nullptr};
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
};

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const bench::Setting setting(arguments);
  const auto world = tessera::init();
  torch::manual_seed(1);
  const Tokens tokens(setting.config.vocabulary, world.rank());
  data::Loader loader(
      data::TokenWindows(tokens.open(), setting.config.length),
      data::LoaderOptions()
          .batch_size(setting.config.batch)
          .epoch_end(data::EpochEnd::Continue)
          .device(setting.device));
  Trainer trainer(setting);
  const data::TokenBatch resident = *loader.next();
  const int steps = arguments.times(kStepsPerTurn);
  for (int i = 0; i < arguments.times(kWarmUp); ++i) {
    trainer.step(*loader.next());
  }
  const auto turn = [&](bool reads) {
    return bench::milliseconds(
               world,
               [&] {
                 for (int i = 0; i < steps; ++i) {
                   trainer.step(reads ? *loader.next() : resident);
                 }
                 bench::synchronize(setting.device);
               }) /
        steps;
  };
  bench::Samples reading;
  bench::Samples staying;
  for (int round = 0; round < arguments.times(kRounds); ++round) {
    reading.push_back(turn(true));
    staying.push_back(turn(false));
  }
  if (world.rank() == 0) {
    bench::print(
        {.name = "loader/step/" + setting.place(world),
         .unit = "ms",
         .ours = reading,
         .limit = staying});
  }
  return 0;
}
