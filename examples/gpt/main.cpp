// Trains a GPT on a folder of text.
//
//   tessera run -n 2 gpt                            # LibTorch's headers
//   tessera run -n 4 gpt --text ~/books --tokenizer bpe --run runs/books
//   gpt --help
//
// Read trainer.cpp first: train_step() is the loop. parallel.cpp is the only
// file that uses Tessera to share the model; model.h is the model, which knows
// nothing about Tessera.
#include <tessera/tessera.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "corpus.h"
#include "file_lock.h"
#include "settings.h"
#include "trainer.h"

namespace {

/// Runs `work` on rank 0. All ranks return when it is done, or throw what it
/// threw. It may take any time: the other ranks are told every second that it
/// is still running.
void on_rank_0(const tessera::Group& world, const std::function<void()>& work) {
  std::future<void> running;
  if (world.rank() == 0) {
    running = std::async(std::launch::async, work);
  }
  std::string state = "working";
  while (state == "working") {
    if (world.rank() == 0 &&
        running.wait_for(std::chrono::seconds(1)) ==
            std::future_status::ready) {
      try {
        running.get();
        state = "done";
      } catch (const std::exception& error) {
        state = std::string("failed: ") + error.what();
      }
    }
    const std::span bytes(
        reinterpret_cast<const uint8_t*>(state.data()), state.size());
    const auto heard = world.broadcast_bytes(bytes, 0, "what rank 0 does");
    state.assign(heard.begin(), heard.end());
  }
  if (state != "done") {
    throw std::runtime_error(state.substr(std::string("failed: ").size()));
  }
}

/// The work of rank 0 before training. Returns the lock of the run if it
/// trains: two processes would overwrite each other's files.
std::optional<gpt::FileLock> prepare(const gpt::Settings& settings) {
  std::optional<gpt::FileLock> lock;
  if (settings.mode == gpt::Mode::Train) {
    lock = gpt::FileLock::if_free(settings.run / ".lock");
    if (!lock) {
      throw std::runtime_error(
          "another process is training in \"" + settings.run.string() +
          "\" already. Wait for that, or choose another --run.");
    }
  }
  std::printf(
      "%s\n",
      gpt::prepare_corpus(
          settings.data, settings.tokens_folder(), settings.has_checkpoints())
          .c_str());
  std::fflush(stdout);
  if (settings.mode == gpt::Mode::Train) {
    gpt::keep_settings(settings);
  }
  return lock;
}

void run(const tessera::Group& world, const gpt::Settings& settings) {
  using gpt::Mode;
  if ((settings.mode == Mode::Evaluate || settings.mode == Mode::Sample) &&
      !std::filesystem::exists(settings.run / "checkpoints")) {
    throw gpt::UsageError(
        "\"" + settings.run.string() + "\" has no checkpoint. Train first.");
  }
  std::optional<gpt::FileLock> lock; // until training ends
  on_rank_0(world, [&] { lock = prepare(settings); });
  if (settings.mode == Mode::Prepare) {
    return;
  }
  gpt::Trainer trainer(
      world, settings, gpt::open_corpus(settings.tokens_folder()));
  if (settings.mode == Mode::Train) {
    trainer.train();
    return;
  }
  if (!trainer.resume()) {
    throw gpt::UsageError(
        "\"" + settings.run.string() + "\" has no checkpoint. Train first.");
  }
  if (settings.mode == Mode::Sample) {
    trainer.write_sample();
    return;
  }
  const double loss = trainer.evaluate();
  if (world.rank() == 0) {
    std::printf("step %ld: validation loss %.6f\n", trainer.step(), loss);
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
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "gpt: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpt: %s\n", error.what());
    return 1;
  }
}
