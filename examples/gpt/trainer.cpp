#include "trainer.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <utility>

#include "device.h"
#include "learning_rate.h"
#include "sampling.h"

namespace gpt {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int) {
  stop_requested = 1;
}

std::string with_commas(int64_t number) {
  auto text = std::to_string(number);
  for (auto i = std::ssize(text) - 3; i > 0; i -= 3) {
    text.insert(static_cast<size_t>(i), ",");
  }
  return text;
}

} // namespace

Trainer::Trainer(
    const tessera::Group& world,
    const Settings& settings,
    Corpus corpus,
    std::unique_ptr<LanguageModel> model)
    : world_(world),
      settings_(settings),
      corpus_(std::move(corpus)),
      device_(device_of(settings.device)),
      parallel_(settings, std::move(model), device_),
      saves_(world, settings_, parallel_),
      utilization_(
          world,
          settings,
          parallel_.model().flops_per_token(),
          device_),
      monitor_(parallel_.module(), {parallel_.optimizer()}),
      live_(
          world.rank(),
          settings.steps,
          settings.json_outcome ? stderr : stdout),
      lowest_validation_loss_(std::numeric_limits<double>::infinity()) {
  if (settings.sample_tokens > 0 && settings.mode != Mode::Evaluate) {
    prompt_tokens( // throws now, not at the end
        parallel_.model(),
        corpus_.tokenizer,
        settings.prompt);
  }
  if (corpus_.validation) {
    evaluation_.emplace(
        settings_, world, *corpus_.validation, parallel_, device_);
  }
  // Every rank gets its own numbers for dropout; the weights have been
  // initialized by now.
  torch::manual_seed(settings.seed + 1 + static_cast<uint64_t>(world.rank()));
}

bool Trainer::resume() {
  const auto found = saves_.load(settings_.from);
  step_ = found.value_or(0);
  return found.has_value();
}

void Trainer::announce(bool resumed) {
  char text[256];
  std::snprintf(
      text,
      sizeof(text),
      "%s of %.2f million parameters on %s: %d rank%s, %ld windows of %ld "
      "tokens per step, %ld at once per rank",
      parallel_.model().description().c_str(),
      static_cast<double>(parallel_.num_parameters()) / 1e6,
      device_.str().c_str(),
      world_.size(),
      world_.size() == 1 ? "" : "s",
      settings_.batch,
      settings_.model.length,
      settings_.rows(world_.size()));
  live_.print(printed_table(settings_.table));
  live_.print(text);
  if (const auto share = utilization_.described(); !share.empty()) {
    live_.print(share);
  }
  const auto change = resumed && world_.rank() == 0
      ? curve_change(settings_, settings_.run / "log.jsonl", step_)
      : "";
  log_->start_with_json(step_, settings_.json, monitor_.units(), device_.str());
  if (!resumed) {
    return;
  }
  log_->resume(step_, saves_.path_of(step_));
  const auto position = learner_->position();
  live_.print(
      "resumed from step " + std::to_string(step_) + ", window " +
      with_commas(position.samples) + " of " +
      with_commas(learner_->num_windows()) + " in epoch " +
      std::to_string(position.epoch + 1));
  if (!change.empty()) {
    live_.print(change);
  }
}

void Trainer::load_weights(bool resumed) {
  if (settings_.weights.empty()) {
    return;
  }
  if (resumed) {
    live_.print(
        "the checkpoint has newer weights than \"" + settings_.weights +
        "\", which is not read");
    return;
  }
  parallel_.load_weights(settings_.weights);
  live_.print("began with the weights in " + settings_.weights);
}

void Trainer::train() {
  std::signal(SIGTERM, request_stop);
  std::signal(SIGINT, request_stop);
  started_ = Clock::now();
  if (settings_.resume == Resume::Never && saves_.latest()) {
    throw UsageError(
        "\"" + saves_.folder().string() +
        "\" has checkpoints of an earlier run. Choose another --run, or let "
        "it --resume.");
  }
  learner_.emplace(settings_, world_, corpus_.train, parallel_, device_);
  learner_->add_to(saves_.state());
  const bool resumed = resume();
  if (!resumed && settings_.resume == Resume::Must) {
    throw UsageError(
        "\"" + saves_.folder().string() +
        "\" has no checkpoint to resume from.");
  }
  log_.emplace(settings_.run);
  announce(resumed);
  load_weights(resumed);
  metrics_.emplace(settings_.run, step_);
  saves_.start(step_, [this](int64_t step, const auto& path, double seconds) {
    log_->checkpoint(step, path, seconds);
  });
  lowest_validation_loss_ = saves_.best_loss();
  if (!settings_.trace.empty()) {
    trace_.emplace(
        settings_.run / "trace", settings_.trace_first, settings_.trace_last);
    if (settings_.trace_last <= step_ ||
        settings_.trace_first > settings_.steps) {
      live_.print(
          "nothing will be traced: these steps are not part of this run");
    }
  }
  if (step_ >= settings_.steps) {
    live_.print("nothing is left to do; give more --steps to continue");
  }
  try {
    make_steps();
  } catch (const c10::Error& error) {
    log_->end(step_, "failed", error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    log_->end(step_, "failed", error.what());
    throw;
  }
}

void Trainer::make_steps() {
  while (step_ < settings_.steps) {
    if (step_ + 1 == settings_.skip_at && world_.rank() == world_.size() - 1) {
      ++step_;
    }
    if (trace_) {
      trace_->at_step(step_ + 1);
    }
    const bool draws = step_ + 1 == settings_.timeline_step;
    const bool is_traced = trace_ && step_ + 1 >= settings_.trace_first &&
        step_ + 1 <= settings_.trace_last;
    monitor_.begin_step(tessera::MonitorOptions().timeline(draws));
    const StepResult result =
        learner_->make_step(step_ + 1, stop_requested != 0, draws || is_traced);
    const tessera::StepReport report = monitor_.end_step();
    ++step_;
    after_step(result, report);
    if (result.stop) {
      finish("stopped");
      return;
    }
  }
  finish("finished");
}

void Trainer::after_step(
    const StepResult& result,
    const tessera::StepReport& report) {
  const int64_t tokens = settings_.batch * settings_.model.length;
  StepMetrics metrics{
      .step = step_,
      .loss = result.loss,
      .lr = result.lr,
      .grad_norm = result.grad_norm,
      .loss_scale = result.loss_scale,
      .skipped = result.skipped,
      .seconds = report.seconds,
      .tokens_per_second = static_cast<double>(tokens) / report.seconds,
      .memory_bytes = report.memory.total()};
  metrics.mfu = utilization_.of(metrics.tokens_per_second);
  loss_ = result.loss;
  ++steps_made_;
  steps_skipped_ += result.skipped ? 1 : 0;
  step_seconds_ += report.seconds;
  log_->step_of_all(
      {.step = metrics.step,
       .loss = metrics.loss,
       .lr = metrics.lr,
       .grad_norm = metrics.grad_norm,
       .tokens = tokens,
       .seconds = metrics.seconds,
       .memory = report.memory,
       .mfu = metrics.mfu,
       .loss_scale = metrics.loss_scale,
       .skipped = metrics.skipped});
  if (!report.spans.empty()) {
    log_->timeline(metrics.step, report.spans);
  }
  live_.show(
      {.step = metrics.step,
       .loss = metrics.loss,
       .lr = metrics.lr,
       .grad_norm = metrics.grad_norm,
       .tokens_per_second = metrics.tokens_per_second,
       .memory_bytes = metrics.memory_bytes,
       .mfu = metrics.mfu,
       .loss_scale = metrics.loss_scale,
       .num_skipped = steps_skipped_});
  metrics.validation_loss = evaluate_if_due();
  metrics_->write(metrics);
  if (is_due(settings_.sample_every)) {
    write_sample();
  }
  // The same on all ranks: the loss is that of all, and so is the best one.
  const bool is_best = settings_.keep_best && metrics.validation_loss &&
      *metrics.validation_loss < saves_.best_loss();
  if (is_best || is_due(settings_.checkpoint_every)) {
    saves_.save(step_, is_best ? metrics.validation_loss : std::nullopt);
  }
  saves_.note_saved();
  if (step_ == settings_.die_at && world_.rank() == world_.size() - 1) {
    ::kill(::getpid(), SIGKILL);
  }
}

bool Trainer::is_due(int64_t every) const {
  return every > 0 && step_ % every == 0;
}

std::optional<double> Trainer::evaluate_if_due() {
  if (!is_due(settings_.eval_every)) {
    return std::nullopt;
  }
  const double loss = evaluate();
  log_->eval(step_, loss);
  const bool is_lowest = loss < lowest_validation_loss_;
  lowest_validation_loss_ = is_lowest ? loss : lowest_validation_loss_;
  char text[96];
  std::snprintf(
      text,
      sizeof(text),
      "step %ld: validation loss %.4f%s",
      step_,
      loss,
      is_lowest && settings_.keep_best ? ", the lowest so far" : "");
  live_.print(text);
  return loss;
}

double Trainer::evaluate() {
  validation_loss_ = evaluation_->loss();
  return *validation_loss_;
}

void Trainer::write_sample() {
  sample_ = continued(
      parallel_.model(),
      corpus_.tokenizer,
      settings_.prompt,
      {.num_tokens = settings_.sample_tokens,
       .length = settings_.model.length,
       .seed = settings_.seed,
       .temperature = settings_.temperature,
       .top_k = settings_.top_k,
       .top_p = settings_.top_p},
      device_);
  live_.print_written(settings_.prompt + sample_);
  if (settings_.mode == Mode::Train) {
    log_->sample(step_, settings_.prompt, sample_);
  }
}

void Trainer::finish(const std::string& reason) {
  saves_.wait();
  if (settings_.checkpoint_every > 0 && saves_.latest() != step_) {
    saves_.save(step_);
    saves_.wait();
  }
  if (trace_) {
    trace_->close();
  }
  if (reason == "finished" && settings_.sample_tokens > 0) {
    write_sample();
  }
  log_->end(step_, reason);
  status_ = reason;
  if (reason == "stopped") {
    live_.print(
        "stopped after step " + std::to_string(step_) +
        (settings_.checkpoint_every > 0
             ? ", which is saved: the same command resumes from here"
             : "; nothing is saved, as --checkpoint-every 0 says"));
  }
  if (trace_ && std::filesystem::exists(trace_->path())) {
    live_.print("trace: " + trace_->path().string());
  }
  if (world_.rank() == 0) {
    write_page();
  }
}

Outcome Trainer::outcome() const {
  Outcome outcome{
      .status = status_,
      .step = step_,
      .loss = loss_,
      .validation_loss = validation_loss_,
      .checkpoint = saves_.newest_path().string(),
      .text = sample_};
  if (lowest_validation_loss_ < std::numeric_limits<double>::infinity()) {
    outcome.best_validation_loss = lowest_validation_loss_;
  }
  if (started_) {
    outcome.seconds =
        std::chrono::duration<double>(Clock::now() - *started_).count();
  }
  if (steps_made_ > 0) {
    outcome.tokens_per_second =
        static_cast<double>(
            steps_made_ * settings_.batch * settings_.model.length) /
        step_seconds_;
    outcome.mfu = utilization_.of(*outcome.tokens_per_second);
  }
  return outcome;
}

/// A report that cannot be written does not undo the training.
void Trainer::write_page() {
  try {
    live_.print("report: " + tessera::write_report(settings_.run).string());
  } catch (const c10::Error& error) {
    live_.print(std::string("no report: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    live_.print(std::string("no report: ") + error.what());
  }
}

} // namespace gpt
