#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/train/trace.h>

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

/// Also records threads that existed before: those of collectives.
torch::profiler::impl::ProfilerConfig config() {
  torch::profiler::impl::ExperimentalConfig experimental;
  experimental.profile_all_threads = true;
  return torch::profiler::impl::ProfilerConfig(
      torch::profiler::impl::ProfilerState::KINETO,
      /*report_input_shapes=*/false,
      /*profile_memory=*/false,
      /*with_stack=*/false,
      /*with_flops=*/false,
      /*with_modules=*/false,
      experimental);
}

std::set<ActivityType> activities() {
  std::set<ActivityType> result{ActivityType::CPU};
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.hasCUDA() && hooks.getNumGPUs() > 0) {
    result.insert(ActivityType::CUDA);
  }
  return result;
}

} // namespace

struct StepTrace::Impl {
  Impl(
      const std::filesystem::path& folder,
      int64_t first_step,
      int64_t last_step)
      : path(
            folder /
            fmt::format("rank{}.json", is_initialized() ? world().rank() : 0)),
        first(first_step),
        last(last_step) {}

  void start() {
    profiler::prepareProfiler(config(), activities());
    profiler::enableProfiler(config(), activities());
    is_running = true;
  }

  void begin_range(int64_t step) {
    range.emplace(at::RecordScope::USER_SCOPE);
    if (range->isActive()) {
      range->before(fmt::format("step {}", step));
    }
  }

  /// Writes the events that were collected.
  void stop() {
    range.reset();
    if (!std::exchange(is_running, false)) {
      return;
    }
    is_over = true;
    const auto result = profiler::disableProfiler();
    std::error_code error;
    std::filesystem::create_directories(path.parent_path(), error);
    if (!error) {
      std::filesystem::remove(path, error); // one of an earlier run
      result->save(path.string());
    }
    if (error || !std::filesystem::exists(path, error)) {
      TORCH_WARN(
          "StepTrace: ",
          path.string(),
          " cannot be written",
          error ? " (" + error.message() + ")" : std::string(),
          ". Training continues without it.");
    }
  }

  const std::filesystem::path path;
  const int64_t first;
  const int64_t last;
  bool is_running = false;
  bool is_over = false;
  std::optional<at::RecordFunction> range; // the current step
};

StepTrace::StepTrace(
    const std::filesystem::path& folder,
    int64_t first_step,
    int64_t last_step)
    : impl_(std::make_unique<Impl>(folder, first_step, last_step)) {
  if (first_step > last_step) {
    raise<c10::ValueError>(
        {.call = "StepTrace"},
        fmt::format(
            "the first step, {}, comes after the last one, {}. Both are part of the trace.",
            first_step,
            last_step));
  }
}

StepTrace::~StepTrace() {
  try {
    close();
  } catch (const std::exception& error) {
    TORCH_WARN("StepTrace: ", error.what());
  }
}

void StepTrace::at_step(int64_t step) {
  if (impl_->is_over) {
    return;
  }
  if (step > impl_->last) {
    impl_->stop();
  } else if (step >= impl_->first) {
    impl_->range.reset();
    if (!impl_->is_running) {
      impl_->start();
    }
    impl_->begin_range(step);
  }
}

void StepTrace::close() {
  impl_->stop();
}

const std::filesystem::path& StepTrace::path() const {
  return impl_->path;
}

} // namespace tessera
