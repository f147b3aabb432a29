#include "trainer.h"

#include <ATen/CPUGeneratorImpl.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <numbers>
#include <stdexcept>
#include <utility>

namespace gpt {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int) {
  stop_requested = 1;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

torch::Device device_of(const std::string& name) {
  const bool has_cuda = torch::cuda::is_available();
  if (name == "cpu" || (name == "auto" && !has_cuda)) {
    return torch::kCPU;
  }
  if (!has_cuda) {
    throw UsageError("--device " + name + ", but LibTorch finds no GPU.");
  }
  const auto count = static_cast<int>(torch::cuda::device_count());
  return {
      torch::kCUDA,
      static_cast<torch::DeviceIndex>(tessera::local_rank() % count)};
}

std::string with_commas(int64_t number) {
  auto text = std::to_string(number);
  for (auto i = std::ssize(text) - 3; i > 0; i -= 3) {
    text.insert(static_cast<size_t>(i), ",");
  }
  return text;
}

} // namespace

double learning_rate(const Settings& settings, int64_t step) {
  if (step < settings.warmup) {
    return settings.lr * static_cast<double>(step + 1) /
        static_cast<double>(settings.warmup);
  }
  const auto falling = std::max<int64_t>(1, settings.steps - settings.warmup);
  const double share = std::min(
      1.0,
      static_cast<double>(step - settings.warmup) /
          static_cast<double>(falling));
  const double height = 0.5 * (1 + std::cos(std::numbers::pi * share));
  return settings.min_lr + (settings.lr - settings.min_lr) * height;
}

Trainer::Trainer(
    const tessera::Group& world,
    const Settings& settings,
    Corpus corpus)
    : world_(world),
      settings_(settings),
      corpus_(std::move(corpus)),
      device_(device_of(settings.device)),
      train_windows_(
          TokenFile(corpus_.train),
          settings.model.length,
          settings.seed),
      validation_windows_(
          TokenFile(corpus_.validation),
          settings.model.length,
          settings.seed),
      parallel_(settings, corpus_.tokenizer.vocabulary(), device_),
      state_(parallel_.model(), {parallel_.optimizer()}),
      checkpoints_(
          settings.run / "checkpoints",
          tessera::checkpoint::ManagerOptions().keep_last(settings.keep)),
      monitor_(parallel_.model(), {parallel_.optimizer()}),
      live_(world.rank(), settings.steps) {
  // Every rank gets its own numbers for dropout; the weights have been
  // initialized by now.
  torch::manual_seed(settings.seed + 1 + static_cast<uint64_t>(world.rank()));
}

bool Trainer::resume() {
  state_.values = {{"step", 0}, {"windows_seen", 0}};
  const auto found = checkpoints_.load_latest(state_);
  if (found) {
    step_ = state_.values.at("step").to_int();
    windows_seen_ = state_.values.at("windows_seen").to_int();
  }
  return found.has_value();
}

void Trainer::announce(bool resumed) {
  char text[256];
  std::snprintf(
      text,
      sizeof(text),
      "GPT of %.2f million parameters on %s: %d rank%s, %ld windows of %ld "
      "tokens per step, %ld at once per rank",
      static_cast<double>(parallel_.num_parameters()) / 1e6,
      device_.str().c_str(),
      world_.size(),
      world_.size() == 1 ? "" : "s",
      settings_.batch,
      settings_.model.length,
      settings_.rows(world_.size()));
  live_.print(text);
  log_->start_with_json(step_, settings_.json, monitor_.units(), device_.str());
  if (resumed) {
    log_->resume(step_, checkpoints_.path_of(step_));
    const auto epoch = windows_seen_ / train_windows_.size();
    live_.print(
        "resumed from step " + std::to_string(step_) + ", window " +
        with_commas(windows_seen_ % train_windows_.size()) + " of " +
        with_commas(train_windows_.size()) + " in epoch " +
        std::to_string(epoch + 1));
  }
}

void Trainer::train() {
  std::signal(SIGTERM, request_stop);
  std::signal(SIGINT, request_stop);
  if (settings_.resume == Resume::Never && checkpoints_.latest()) {
    throw UsageError(
        "\"" + checkpoints_.folder().string() +
        "\" has checkpoints of an earlier run. Choose another --run, or let "
        "it --resume.");
  }
  const bool resumed = resume();
  if (!resumed && settings_.resume == Resume::Must) {
    throw UsageError(
        "\"" + checkpoints_.folder().string() +
        "\" has no checkpoint to resume from.");
  }
  log_.emplace(settings_.run);
  announce(resumed);
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
      windows_seen_ += settings_.batch;
    }
    if (trace_) {
      trace_->at_step(step_ + 1);
    }
    const bool draws = step_ + 1 == settings_.timeline_step;
    monitor_.begin_step(tessera::MonitorOptions().timeline(draws));
    const StepResult result = train_step();
    const tessera::StepReport report = monitor_.end_step();
    ++step_;
    windows_seen_ += settings_.batch;
    after_step(result, report);
    if (result.stop) {
      finish("stopped");
      return;
    }
  }
  finish("finished");
}

/// The whole of training: everything else supports it.
Trainer::StepResult Trainer::train_step() {
  tessera::step_token(step_ + 1); // all ranks are at the same step
  auto& optimizer = parallel_.optimizer();
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(learning_rate(settings_, step_));
  }
  const int64_t rows = settings_.rows(world_.size());
  const int64_t times = settings_.accumulation(world_.size());
  // The mean loss over the batch, and whether any rank was asked to stop.
  auto together = torch::zeros({2}, torch::kDouble);
  torch::Tensor sum_of_losses = torch::zeros({}, device_);
  for (int64_t i = 0; i < times; ++i) {
    const auto batch = train_windows_.shuffled(
        windows_seen_ + (i * world_.size() + world_.rank()) * rows, rows);
    parallel_.set_syncs_gradients(i + 1 == times);
    const auto loss =
        parallel_.loss(batch.inputs.to(device_), batch.targets.to(device_)) /
        times;
    loss.backward(); // averages over the ranks as it goes
    sum_of_losses += loss.detach();
  }
  const double norm =
      tessera::clip_grad_norm_(parallel_.model(), settings_.clip);
  if (!std::isfinite(norm)) {
    throw std::runtime_error(
        "the gradients of step " + std::to_string(step_ + 1) +
        " are not finite, so the step was not made. Resume with a lower "
        "--lr or a longer --warmup; if that fails too, remove the newest "
        "checkpoint first.");
  }
  optimizer.step();
  optimizer.zero_grad();

  together[0] = sum_of_losses.item<double>();
  together[1] = static_cast<double>(stop_requested);
  world_.all_reduce(together, tessera::ReduceOp::Avg, "loss");
  return {
      .loss = together[0].item<double>(),
      .grad_norm = norm,
      .stop = together[1].item<double>() > 0};
}

void Trainer::after_step(
    const StepResult& result,
    const tessera::StepReport& report) {
  const int64_t tokens = settings_.batch * settings_.model.length;
  const double lr = learning_rate(settings_, step_ - 1);
  log_->step_of_all(
      {.step = step_,
       .loss = result.loss,
       .lr = lr,
       .grad_norm = result.grad_norm,
       .tokens = tokens,
       .seconds = report.seconds,
       .memory = report.memory});
  if (!report.spans.empty()) {
    log_->timeline(step_, report.spans);
  }
  live_.show(
      {.step = step_,
       .loss = result.loss,
       .lr = lr,
       .tokens_per_second = static_cast<double>(tokens) / report.seconds,
       .memory_bytes = report.memory.total()});
  const auto is_due = [this](int64_t every) {
    return every > 0 && step_ % every == 0;
  };
  if (is_due(settings_.eval_every)) {
    const double loss = evaluate();
    log_->eval(step_, loss);
    char text[64];
    std::snprintf(
        text, sizeof(text), "step %ld: validation loss %.4f", step_, loss);
    live_.print(text);
  }
  if (is_due(settings_.sample_every)) {
    write_sample();
  }
  if (is_due(settings_.checkpoint_every)) {
    save();
  }
  note_saved();
  if (step_ == settings_.die_at && world_.rank() == world_.size() - 1) {
    ::kill(::getpid(), SIGKILL);
  }
}

double Trainer::evaluate() {
  const torch::NoGradGuard no_grad;
  auto& model = parallel_.model();
  model->eval();
  const int64_t all =
      std::min(settings_.eval_windows, validation_windows_.size());
  const int64_t rows = settings_.rows(world_.size());
  auto sum = torch::zeros({}, torch::kDouble);
  for (int64_t begin = 0; begin < all; begin += rows * world_.size()) {
    const int64_t first = begin + world_.rank() * rows;
    const int64_t count = std::clamp<int64_t>(all - first, 0, rows);
    // Every rank computes the same number of times: a sharded model needs all
    // ranks.
    const auto batch = validation_windows_.spread(
        count > 0 ? first : 0, std::max<int64_t>(count, 1), all);
    const auto loss =
        parallel_.loss(batch.inputs.to(device_), batch.targets.to(device_));
    sum += loss.item<double>() * static_cast<double>(count);
  }
  model->train();
  world_.all_reduce(sum, tessera::ReduceOp::Sum, "validation loss");
  return sum.item<double>() / static_cast<double>(all);
}

std::string Trainer::sample() {
  const torch::NoGradGuard no_grad;
  auto& model = parallel_.model();
  model->eval();
  // Random numbers of its own: training continues as if nothing had been
  // sampled.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(settings_.seed);
  auto tokens = corpus_.tokenizer.encode(
      settings_.prompt.empty() ? "\n" : settings_.prompt);
  const auto prompt_tokens = std::ssize(tokens);
  for (int64_t i = 0; i < settings_.sample_tokens; ++i) {
    const auto seen = std::min(std::ssize(tokens), settings_.model.length);
    const auto ids =
        torch::from_blob(
            tokens.data() + std::ssize(tokens) - seen, {1, seen}, torch::kInt)
            .to(device_, torch::kLong);
    const auto logits =
        model->forward(ids)[0][-1].to(torch::kCPU, torch::kFloat);
    const auto next = torch::multinomial(
        torch::softmax(logits / settings_.temperature, 0),
        /*num_samples=*/1,
        /*replacement=*/false,
        generator);
    tokens.push_back(static_cast<int32_t>(next.item<int64_t>()));
  }
  model->train();
  return corpus_.tokenizer.decode(
      std::span(tokens).subspan(static_cast<size_t>(prompt_tokens)));
}

void Trainer::write_sample() {
  const auto text = sample();
  live_.print_written(settings_.prompt + text);
  if (settings_.mode == Mode::Train) {
    log_->sample(step_, settings_.prompt, text);
  }
}

/// Checks all ranks. A checkpoint must be worth resuming from.
bool Trainer::has_finite_parameters() {
  auto is_finite = torch::ones({}, torch::kDouble);
  for (const auto& parameter : tessera::parameters(parallel_.model())) {
    if (!torch::isfinite(parameter.detach().sum()).item<bool>()) {
      is_finite.zero_();
    }
  }
  world_.all_reduce(is_finite, tessera::ReduceOp::Min, "finite parameters");
  return is_finite.item<double>() > 0;
}

void Trainer::save() {
  if (!has_finite_parameters()) {
    throw std::runtime_error(
        "parameters are not finite after step " + std::to_string(step_) +
        ", so they are not saved. Resume with a lower --lr or a longer "
        "--warmup.");
  }
  const auto start = Clock::now();
  checkpoints_.wait(); // waits for the previous save; throws if that failed
  note_saved();
  state_.values = {{"step", step_}, {"windows_seen", windows_seen_}};
  if (settings_.wait_for_saves) {
    checkpoints_.save(step_, state_);
  } else {
    checkpoints_.async_save(step_, state_);
  }
  newest_ = Save{.step = step_, .blocked_seconds = seconds_since(start)};
}

/// Puts the newest save into the log once it is complete. Ranks may notice that
/// at different times, and only rank 0 writes the log: nothing else may depend
/// on it.
void Trainer::note_saved() {
  if (!newest_ || newest_->is_logged || checkpoints_.is_saving()) {
    return;
  }
  const auto path = checkpoints_.path_of(newest_->step);
  if (std::filesystem::exists(
          path)) { // otherwise it failed: wait() will report it
    log_->checkpoint(newest_->step, path, newest_->blocked_seconds);
    newest_->is_logged = true;
  }
}

/// Waits until the newest save is complete.
void Trainer::wait_for_save() {
  const auto start = Clock::now();
  checkpoints_.wait();
  if (newest_) {
    newest_->blocked_seconds += seconds_since(start);
  }
  note_saved();
}

void Trainer::finish(const std::string& reason) {
  wait_for_save();
  if (settings_.checkpoint_every > 0 && checkpoints_.latest() != step_) {
    save();
    wait_for_save();
  }
  if (trace_) {
    trace_->close();
  }
  if (reason == "finished" && settings_.sample_tokens > 0) {
    write_sample();
  }
  log_->end(step_, reason);
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
