// Trains a GPT on a folder of text.
//
//   tessera run -n 2 gpt                            # LibTorch's headers
//   tessera run -n 4 gpt --text ~/books --tokenizer bpe --run runs/books
//   gpt --help
//
// Read trainer.cpp first: train_step() is the loop. parallel.cpp is all that
// Tessera has to do with it, model.h the model, which knows nothing of it.
#include <tessera/tessera.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "corpus.h"
#include "settings.h"
#include "trainer.h"

namespace {

/// Runs `work` on rank 0. All ranks return when it is done, or throw what it
/// threw.
void on_rank_0(const tessera::Group& world, const std::function<void()>& work) {
  std::string error;
  if (world.rank() == 0) {
    try {
      work();
    } catch (const std::exception& caught) {
      error = caught.what();
      error = error.empty() ? "failed" : error;
    }
  }
  const std::span bytes(
      reinterpret_cast<const uint8_t*>(error.data()), error.size());
  const auto heard = world.broadcast_bytes(bytes, 0, "what rank 0 did");
  if (!heard.empty()) {
    throw std::runtime_error(std::string(heard.begin(), heard.end()));
  }
}

void run(const tessera::Group& world, const gpt::Settings& settings) {
  on_rank_0(world, [&] {
    const auto done = gpt::prepare_corpus(settings.data, settings.data_folder);
    if (!done.empty()) {
      std::printf("%s\n", done.c_str());
      std::fflush(stdout);
    }
  });
  if (settings.mode == gpt::Mode::kPrepare) {
    return;
  }
  gpt::Trainer trainer(world, settings, gpt::open_corpus(settings.data_folder));
  if (settings.mode == gpt::Mode::kTrain) {
    trainer.train();
    return;
  }
  if (!trainer.resume()) {
    throw gpt::UsageError(
        "\"" + settings.run.string() + "\" has no checkpoint. Train first.");
  }
  if (settings.mode == gpt::Mode::kEvaluate) {
    const double loss = trainer.evaluate();
    if (world.rank() == 0) {
      std::printf("step %ld: validation loss %.6f\n", trainer.step(), loss);
    }
  } else {
    trainer.write_sample();
  }
}

} // namespace

int main(int argc, char** argv) {
  int rank = 0;
  try {
    const auto world = tessera::init();
    rank = world.rank();
    const auto settings =
        gpt::parse_settings(argc, argv, world.size(), rank == 0);
    if (settings) {
      run(world, *settings);
    }
    return 0;
  } catch (const gpt::UsageError& error) {
    if (rank == 0) {
      std::fprintf(
          stderr, "gpt: %s\ngpt --help lists all flags.\n", error.what());
    }
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpt: %s\n", error.what());
    return 1;
  }
}
