#include <tessera/comm/agree.h>
#include <tessera/ddp/power_sgd.h>
#include <tessera/error.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera {
namespace {

constexpr const char* kPowerSgdLabel = "ddp: gradients, PowerSGD";

void check(const PowerSGDOptions& options, const Group& group) {
  const ErrorSite site{
      .call = "PowerSGDState",
      .rank = group.rank(),
      .world_size = group.size()};
  if (options.matrix_approximation_rank() < 1) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "matrix_approximation_rank is {}, must be 1 or more.",
            options.matrix_approximation_rank()));
  }
  if ((options.use_error_feedback() || options.warm_start()) &&
      options.start_powerSGD_iter() <= 1) {
    raise<c10::ValueError>(
        site,
        "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, because PowerSGD can only be applied after the first two iterations in DDP.");
  }
}

/// Orthogonalizes by Gram-Schmidt, column by column.
void orthogonalize_columns(const at::Tensor& matrix, double epsilon) {
  for (int64_t i = 0; i < matrix.size(1); ++i) {
    const at::Tensor column = matrix.narrow(1, i, 1);
    column.div_(column.norm() + epsilon);
    if (i + 1 < matrix.size(1)) {
      const at::Tensor rest = matrix.narrow(1, i + 1, matrix.size(1) - i - 1);
      rest.sub_(at::mm(column, at::mm(column.t(), rest)));
    }
  }
}

void orthogonalize(const at::Tensor& matrix, double epsilon) {
  if (epsilon != 0) {
    orthogonalize_columns(matrix, epsilon);
    return;
  }
  const bool is_wide = matrix.scalar_type() == at::kDouble;
  const at::Tensor input = is_wide ? matrix : matrix.to(at::kFloat);
  matrix.copy_(std::get<0>(at::linalg_qr(input)));
}

/// Packs tensors of a bucket into one tensor, which is sent.
struct Packed {
  at::Tensor flat;
  std::vector<at::Tensor> views;

  Packed() = default;
  Packed(
      const std::vector<std::vector<int64_t>>& shapes,
      const at::TensorOptions& options) {
    int64_t numel = 0;
    for (const auto& shape : shapes) {
      numel += c10::multiply_integers(shape);
    }
    flat = at::empty({numel}, options);
    int64_t begin = 0;
    for (const auto& shape : shapes) {
      const int64_t size = c10::multiply_integers(shape);
      views.push_back(flat.narrow(0, begin, size).view(shape));
      begin += size;
    }
  }
};

} // namespace

PowerSGDState::PowerSGDState(const Group& group, const PowerSGDOptions& options)
    : group_(group), options_(options) {
  agree(
      group,
      "PowerSGDState",
      {fmt::format(
          "matrix_approximation_rank {}, start_powerSGD_iter {}, min_compression_rate {}, use_error_feedback {}, warm_start {}, orthogonalization_epsilon {}, random_seed {}",
          options.matrix_approximation_rank(),
          options.start_powerSGD_iter(),
          options.min_compression_rate(),
          options.use_error_feedback(),
          options.warm_start(),
          options.orthogonalization_epsilon(),
          options.random_seed())});
  check(options, group);
}

at::Tensor PowerSGDState::error(size_t bucket) const {
  const auto found = errors_.find(bucket);
  return found == errors_.end() ? at::Tensor() : found->second;
}

/// One bucket in flight. With M this rank's matrix and Q the previous factor:
///
///   P = orthogonalized sum of M Q       started during backward
///   Q = average of M^T P                at the end of backward
///   M = P Q^T
class PowerSGD {
 public:
  static CommHook make_hook(
      std::shared_ptr<PowerSGDState> state,
      bool is_batched) {
    return [state = std::move(state), is_batched](GradBucket& bucket) {
      const bool compresses =
          state->iteration_ >= state->options_.start_powerSGD_iter();
      if (bucket.is_last()) {
        ++state->iteration_;
      }
      if (!compresses) {
        return allreduce_hook(state->group_)(bucket);
      }
      const at::NoGradGuard no_grad;
      auto power = std::make_shared<PowerSGD>(state, bucket, is_batched);
      return CommFuture([power] { return power->finish(); });
    };
  }

  PowerSGD(
      std::shared_ptr<PowerSGDState> state,
      const GradBucket& bucket,
      bool is_batched)
      : state_(std::move(state)),
        index_(bucket.index()),
        buffer_(bucket.buffer()) {
    add_error();
    if (is_batched) {
      take_whole();
    } else {
      take_each(bucket.gradients());
    }
    start();
  }

  at::Tensor finish() {
    const at::NoGradGuard no_grad;
    const double epsilon = options().orthogonalization_epsilon();
    rest_work_.wait();
    if (!matrices_.empty()) {
      left_work_.wait();
      for (size_t i = 0; i < matrices_.size(); ++i) {
        orthogonalize(left_.views[i], epsilon);
        right_.views[i].copy_(at::mm(matrices_[i].t(), left_.views[i]));
      }
      state_->group_.all_reduce(right_.flat, ReduceOp::Avg, kPowerSgdLabel);
      for (size_t i = 0; i < matrices_.size(); ++i) {
        matrices_[i].copy_(at::mm(left_.views[i], right_.views[i].t()));
      }
    }
    write_back();
    if (options().use_error_feedback()) {
      state_->errors_[index_] = input_.sub_(buffer_);
    }
    if (options().warm_start()) {
      state_->factors_[index_] = right_.views;
    }
    return buffer_;
  }

 private:
  const PowerSGDOptions& options() const {
    return state_->options_;
  }

  void add_error() {
    if (!options().use_error_feedback()) {
      return;
    }
    const at::Tensor error = state_->error(index_);
    if (error.defined() && error.numel() == buffer_.numel()) {
      buffer_.add_(error);
    }
    input_ = buffer_.clone();
  }

  /// Treats gradients as matrices if that saves communication.
  void take_each(const std::vector<at::Tensor>& gradients) {
    for (const at::Tensor& gradient : gradients) {
      const int64_t rows = gradient.dim() == 0 ? 1 : gradient.size(0);
      const int64_t columns = rows == 0 ? 0 : gradient.numel() / rows;
      const auto sent =
          static_cast<double>((rows + columns) * rank_of(rows, columns));
      if (gradient.dim() > 1 &&
          sent * options().min_compression_rate() <
              static_cast<double>(gradient.numel())) {
        matrices_.push_back(gradient.view({rows, columns}));
      } else {
        small_.push_back(gradient.view({-1}));
      }
    }
  }

  /// The bucket as one matrix, padded with zeros.
  void take_whole() {
    const auto side = static_cast<int64_t>(
        std::ceil(std::sqrt(static_cast<double>(buffer_.numel()))));
    const at::Tensor square = at::zeros({side * side}, buffer_.options());
    square.narrow(0, 0, buffer_.numel()).copy_(buffer_);
    matrices_.push_back(square.view({side, side}));
    square_ = square;
  }

  int64_t rank_of(int64_t rows, int64_t columns) const {
    return std::min({options().matrix_approximation_rank(), rows, columns});
  }

  void start() {
    if (!small_.empty()) {
      rest_ = at::cat(small_);
      rest_work_ =
          state_->group_.all_reduce_async(rest_, ReduceOp::Avg, kPowerSgdLabel);
    }
    if (matrices_.empty()) {
      return;
    }
    std::vector<std::vector<int64_t>> left;
    std::vector<std::vector<int64_t>> right;
    for (const at::Tensor& matrix : matrices_) {
      const int64_t rank = rank_of(matrix.size(0), matrix.size(1));
      left.push_back({matrix.size(0), rank});
      right.push_back({matrix.size(1), rank});
    }
    left_ = Packed(left, buffer_.options());
    right_ = Packed(right, buffer_.options());
    fill_right();
    for (size_t i = 0; i < matrices_.size(); ++i) {
      left_.views[i].copy_(at::mm(matrices_[i], right_.views[i]));
    }
    left_work_ = state_->group_.all_reduce_async(
        left_.flat, ReduceOp::Sum, kPowerSgdLabel);
  }

  /// Starts with the last factors, or with random ones that are the same on
  /// every rank.
  void fill_right() {
    const auto last = state_->factors_.find(index_);
    for (size_t i = 0; i < right_.views.size(); ++i) {
      const at::Tensor& factor = right_.views[i];
      if (last != state_->factors_.end() && i < last->second.size() &&
          last->second[i].sizes() == factor.sizes()) {
        factor.copy_(last->second[i]);
      } else {
        const auto seed = static_cast<uint64_t>(options().random_seed());
        auto generator = at::make_generator<at::CPUGeneratorImpl>(
            seed + 0x9E3779B97F4A7C15 * ++state_->num_draws_);
        factor.copy_(at::randn(
            factor.sizes(), generator, at::TensorOptions(at::kFloat)));
      }
      orthogonalize(factor, options().orthogonalization_epsilon());
    }
  }

  void write_back() {
    int64_t begin = 0;
    for (const at::Tensor& gradient : small_) {
      gradient.copy_(rest_.narrow(0, begin, gradient.numel()));
      begin += gradient.numel();
    }
    if (square_.defined()) {
      buffer_.copy_(square_.narrow(0, 0, buffer_.numel()));
    }
  }

  const std::shared_ptr<PowerSGDState> state_;
  const size_t index_;
  const at::Tensor buffer_;
  at::Tensor input_; // with the error of the last compression added
  std::vector<at::Tensor> matrices_; // views of the buffer, or of square_
  at::Tensor square_; // undefined unless the bucket is one matrix
  std::vector<at::Tensor> small_; // views of the buffer
  at::Tensor rest_;
  Work rest_work_;
  Packed left_; // P
  Packed right_; // Q
  Work left_work_;
};

CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state) {
  return PowerSGD::make_hook(std::move(state), /*is_batched=*/false);
}

CommHook batched_powerSGD_hook(std::shared_ptr<PowerSGDState> state) {
  return PowerSGD::make_hook(std::move(state), /*is_batched=*/true);
}

} // namespace tessera
