// Trains a GPT, or a language model that was written in Python, on a folder of
// text or a file of tokens.
//
//   tessera run -n 2 gpt                            # LibTorch's headers
//   tessera run -n 4 gpt --text ~/books --tokenizer bpe --run runs/books
//   tessera run -n 2 gpt --model model.pt2 --run runs/python
//   gpt --help
//
// Read learner.cpp first: make_step() is the loop. parallel.cpp shares the
// model among the ranks; model.h is the built-in model, which knows nothing
// about Tessera, exported_model.cpp one of --model; language_model.h is what
// the trainer sees of both. trainer.cpp watches, evaluates and saves.
#include <tessera/tessera.h>

#include <algorithm>
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
#include <string_view>
#include <utility>

#include "corpus.h"
#include "file_lock.h"
#include "language_model.h"
#include "model_file.h"
#include "outcome.h"
#include "settings.h"
#include "trainer.h"

namespace {

constexpr std::string_view kFailed = "failed: ";
constexpr std::string_view kRefused = "refused: ";

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
      } catch (const gpt::UsageError& error) {
        state = std::string(kRefused) + error.what();
      } catch (const c10::Error& error) {
        state = std::string(kFailed) + error.what_without_backtrace();
      } catch (const std::exception& error) {
        state = std::string(kFailed) + error.what();
      }
    }
    const std::span bytes(
        reinterpret_cast<const uint8_t*>(state.data()), state.size());
    const auto heard = world.broadcast_bytes(bytes, 0, "what rank 0 does");
    state.assign(heard.begin(), heard.end());
  }
  if (state.starts_with(kRefused)) {
    throw gpt::UsageError(state.substr(kRefused.size()));
  }
  if (state != "done") {
    throw std::runtime_error(state.substr(kFailed.size()));
  }
}

/// The work of rank 0 before training. Returns the lock of the run if it
/// trains: two processes would overwrite each other's files.
std::optional<gpt::FileLock> prepare(gpt::Settings& settings) {
  std::optional<gpt::FileLock> lock;
  if (settings.mode == gpt::Mode::Train) {
    lock = gpt::FileLock::if_free(settings.run / ".lock");
    if (!lock) {
      throw std::runtime_error(
          "another process is training in \"" + settings.run.string() +
          "\" already. Wait for that, or choose another --run.");
    }
  }
  gpt::check_model_file(settings);
  std::FILE* const out = settings.json_outcome ? stderr : stdout;
  std::fprintf(
      out,
      "%s\n",
      gpt::prepare_corpus(
          settings.data, settings.tokens_folder(), settings.has_checkpoints())
          .c_str());
  std::fflush(out);
  return lock;
}

const char* name_of(gpt::Mode mode) {
  switch (mode) {
    case gpt::Mode::Train:
      return "train";
    case gpt::Mode::Evaluate:
      return "eval";
    case gpt::Mode::Sample:
      return "sample";
    case gpt::Mode::Prepare:
      return "prepare";
  }
  return "";
}

void evaluate_or_sample(
    const tessera::Group& world,
    const gpt::Settings& settings,
    gpt::Trainer& trainer) {
  if (!trainer.resume()) {
    throw gpt::UsageError(
        "\"" + settings.run.string() + "\" has no " +
        (settings.from == gpt::From::Best
             ? "best checkpoint. Train with --keep-best first."
             : "checkpoint. Train first."));
  }
  if (settings.mode == gpt::Mode::Sample) {
    trainer.write_sample();
    return;
  }
  const double loss = trainer.evaluate();
  if (world.rank() == 0) {
    std::fprintf(
        settings.json_outcome ? stderr : stdout,
        "step %ld: validation loss %.6f\n",
        trainer.step(),
        loss);
  }
}

/// Says in `outcome` how far the run has come, also if it throws.
void run(
    const tessera::Group& world,
    gpt::Settings settings,
    gpt::Outcome& outcome) {
  using gpt::Mode;
  if ((settings.mode == Mode::Evaluate || settings.mode == Mode::Sample) &&
      !std::filesystem::exists(settings.run / "checkpoints")) {
    throw gpt::UsageError(
        "\"" + settings.run.string() + "\" has no checkpoint. Train first.");
  }
  std::optional<gpt::FileLock> lock; // until training ends
  on_rank_0(world, [&] { lock = prepare(settings); });
  if (settings.mode == Mode::Prepare) {
    outcome.status = "finished";
    return;
  }
  auto corpus = gpt::open_corpus(settings.tokens_folder());
  auto model = gpt::make_model(settings, corpus);
  if (settings.mode == Mode::Train) { // the model may have chosen the length
    on_rank_0(world, [&] { gpt::keep_settings(settings); });
  }
  gpt::Trainer trainer(world, settings, std::move(corpus), std::move(model));
  try {
    if (settings.mode == Mode::Train) {
      trainer.train();
      outcome = trainer.outcome();
    } else {
      evaluate_or_sample(world, settings, trainer);
      outcome = trainer.outcome();
      outcome.status = "finished";
    }
  } catch (...) {
    outcome = trainer.outcome();
    throw;
  }
}

/// Runs `body`, which sets the outcome; what it throws is in the outcome and on
/// stderr. Returns the exit code.
int guarded(
    gpt::Outcome& outcome,
    const int& rank,
    const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const gpt::UsageError& error) {
    outcome.status = "refused";
    outcome.error = error.what();
    if (rank == 0) {
      std::fprintf(
          stderr, "gpt: %s\ngpt --help lists all flags.\n", error.what());
    }
    return 2;
  } catch (const c10::Error& error) {
    outcome.error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    outcome.error = error.what();
  }
  outcome.status = "failed";
  std::fprintf(stderr, "gpt: %s\n", outcome.error.c_str());
  return 1;
}

} // namespace

int main(int argc, char** argv) {
  int rank = 0;
  const std::span words(argv, static_cast<size_t>(argc));
  // Settings that cannot be read have an outcome too.
  bool prints_json =
      std::any_of(words.begin(), words.end(), [](std::string_view word) {
        return word == "--json";
      });
  gpt::Outcome outcome;
  const int exit_code = guarded(outcome, rank, [&] {
    const auto world = tessera::init();
    rank = world.rank();
    const auto settings =
        gpt::parse_settings(argc, argv, world.size(), rank == 0);
    prints_json = settings && settings->json_outcome;
    if (!settings) {
      return; // --help
    }
    try {
      run(world, *settings, outcome);
    } catch (...) {
      outcome.mode = name_of(settings->mode);
      throw;
    }
    outcome.mode = name_of(settings->mode);
  });
  if (prints_json && rank == 0) {
    std::printf("%s\n", gpt::json_of(outcome).c_str());
  }
  return exit_code;
}
