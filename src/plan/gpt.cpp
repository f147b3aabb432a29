#include "plan/gpt.h"

#include <algorithm>
#include <string>
#include <utility>

#include "nn/chunk_size.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

constexpr int64_t kIdBytes = 8;
constexpr int64_t kFloatBytes = 4;
/// The state of the CPU's random number generator.
constexpr int64_t kRandomStateBytes = 5056;

/// Positions in the kinds that model_of() makes.
namespace block_param {
enum : size_t {
  kNorm1Weight,
  kNorm1Bias,
  kQkvWeight,
  kQkvBias,
  kOutWeight,
  kOutBias,
  kNorm2Weight,
  kNorm2Bias,
  kUpWeight,
  kUpBias,
  kDownWeight,
  kDownBias,
};
} // namespace block_param
/// Of a root that is not split.
namespace root_param {
enum : size_t { kTokens, kPositions, kNormWeight, kNormBias, kHead };
} // namespace root_param

void check_size(const char* name, int64_t value, int64_t most) {
  if (value < 1 || value > most) {
    throw PlanError(
        std::string(name) + " is " + std::to_string(value) +
        ": expected 1 to " + std::to_string(most) + ".");
  }
}

Param param(std::string name, engine::Shape shape) {
  return {.name = std::move(name), .shape = std::move(shape)};
}

} // namespace

void check(const GptShape& shape) {
  check_size("layers", shape.layers, kMostLayers);
  check_size("width", shape.width, kMostOfASize);
  check_size("heads", shape.heads, kMostOfASize);
  check_size("vocabulary", shape.vocabulary, kMostOfASize);
  check_size("length", shape.length, kMostOfASize);
  if (shape.width % shape.heads != 0) {
    throw PlanError(
        "width " + std::to_string(shape.width) + " is not a multiple of " +
        std::to_string(shape.heads) +
        " heads: each head has width / heads elements. Change one of them.");
  }
  if (shape.splits_root && shape.is_tied) {
    throw PlanError(
        "a tied embedding is also the output layer, so neither can be a unit of its own: they stay in the root.");
  }
}

Model model_of(const GptShape& shape) {
  check(shape);
  const int64_t w = shape.width;
  Model model;
  model.kinds.push_back(
      {{param("norm1.weight", {w}),
        param("norm1.bias", {w}),
        param("qkv.weight", {times(3, w), w}),
        param("qkv.bias", {3 * w}),
        param("out.weight", {w, w}),
        param("out.bias", {w}),
        param("norm2.weight", {w}),
        param("norm2.bias", {w}),
        param("up.weight", {4 * w, w}),
        param("up.bias", {4 * w}),
        param("down.weight", {w, 4 * w}),
        param("down.bias", {w})}});
  const Param tokens = param("tokens.weight", {shape.vocabulary, w});
  const Param head = param("head.weight", {shape.vocabulary, w});
  UnitKind root{
      {param("positions.weight", {shape.length, w}),
       param("norm.weight", {w}),
       param("norm.bias", {w})}};
  if (!shape.splits_root) {
    root.params.insert(root.params.begin(), tokens);
    if (!shape.is_tied) {
      root.params.push_back(head);
    }
  }
  model.kinds.push_back(std::move(root));
  if (shape.splits_root) {
    model.kinds.push_back({{tokens}});
    model.kinds.push_back({{head}});
    model.units.push_back({"tokens", 2});
  }
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    model.units.push_back({"blocks." + std::to_string(layer), 0});
  }
  if (shape.splits_root) {
    model.units.push_back({"head", 3});
  }
  model.units.push_back({"root", 1});
  model.description = "GPT, " + std::to_string(shape.layers) +
      " layers of width " + std::to_string(w) + ", " +
      std::to_string(shape.heads) + " heads, vocabulary " +
      std::to_string(shape.vocabulary) + ", length " +
      std::to_string(shape.length) + (shape.is_tied ? ", tied" : ", untied");
  return model;
}

GptProgram::GptProgram(
    const GptShape& shape,
    const GptRun& run,
    format::DType compute,
    Device device)
    : shape_(shape), recomputes_(run.recomputes) {
  check(shape);
  check_size("batch", run.batch, int64_t{1} << 40);
  const int64_t element = format::element_bytes(compute);
  const format::DType loss = run.loss_dtype.value_or(compute);
  const int64_t count = times(run.batch, shape.length);
  // On the CPU a norm keeps what it is computed in.
  const int64_t stat =
      device == Device::Cpu ? element : std::max(element, kFloatBytes);
  tokens_ = times(count, kIdBytes);
  states_ = times(count, shape.width, element);
  stats_ = times(count, 2, stat);
  log_sum_exp_ = times(count, shape.heads, std::max(element, kFloatBytes));
  random_state_ = device == Device::Cpu ? kRandomStateBytes : 0;
  positions_ = times(shape.length, shape.width, element);
  position_ids_ = times(shape.length, kIdBytes);
  logits_ = times(count, shape.vocabulary, element);
  loss_logits_ = times(count, shape.vocabulary, format::element_bytes(loss));
  casts_logits_ = loss != compute;
  const auto tokens = static_cast<double>(count);
  const auto width = static_cast<double>(shape.width);
  square_flops_ = 2 * tokens * width * width;
  attention_flops_ = 4 * tokens * width * static_cast<double>(shape.length);
  head_flops_ = 2 * tokens * width * static_cast<double>(shape.vocabulary);
  if (run.chunks_loss) {
    const bool on_cpu = device == Device::Cpu;
    const int64_t sum = std::max(element, kFloatBytes);
    const int64_t product = on_cpu ? sum : element;
    const int64_t chunk = std::min(
        count, nn::usual_chunk(count, shape.width, shape.vocabulary, on_cpu));
    const int64_t weight = times(shape.vocabulary, shape.width);
    chunked_.is_wanted = true;
    // Logits and their log-softmax, where no kernel works in place; the weight
    // in the dtype of products; targets, factors and losses of tokens.
    chunked_.held = plus(
        times(chunk, shape.vocabulary, (on_cpu ? 2 : 1) * product),
        plus(
            product == element ? 0 : times(weight, product),
            times(count, 1 + kIdBytes + 4 * sum)));
    chunked_.hidden_gradient = compute == format::DType::Float16
        ? times(count, shape.width, kFloatBytes)
        : states_;
    chunked_.weight_gradient = times(weight, sum);
    chunked_.casts_weight_gradient = sum != element;
  }
  times(states_, 64); // what a block has at most, so that sums need no check
}

size_t GptProgram::num_layers() const {
  return static_cast<size_t>(shape_.layers);
}

size_t GptProgram::head() const {
  return shape_.is_tied ? root_param::kTokens : root_param::kHead;
}

size_t GptProgram::first_block() const {
  return shape_.splits_root ? 1 : 0;
}

size_t GptProgram::root() const {
  return num_layers() + (shape_.splits_root ? 2 : 0);
}

GptProgram::Place GptProgram::place_of(size_t param) const {
  if (!shape_.splits_root) {
    return {root(), param};
  }
  if (param == root_param::kTokens) {
    return {0, 0};
  }
  if (param == root_param::kHead) {
    return {root() - 1, 0};
  }
  return {root(), param - 1}; // behind the tokens
}

void GptProgram::touch(Rank& rank, size_t param) const {
  rank.touch(place_of(param).unit);
}

void GptProgram::add_gradient(Rank& rank, size_t param) const {
  const Place place = place_of(param);
  rank.add_gradient(place.unit, place.param);
}

/// What backward does when it has the gradient of a unit of one parameter.
void GptProgram::finish_split(Rank& rank, size_t param) const {
  if (shape_.splits_root) {
    rank.finish_unit(place_of(param).unit);
  }
}

void GptProgram::forward(Rank& rank, Account& account) const {
  Ledger& ledger = account.device;
  constexpr Kind kind = Kind::Activations;
  using namespace root_param; // NOLINT: names of one enum
  ledger.add(kind, 2 * tokens_); // ids and targets
  touch(rank, kTokens);
  ledger.add(kind, states_); // of the tokens
  touch(rank, kPositions);
  ledger.add(kind, position_ids_ + positions_);
  ledger.add(kind, states_); // their sum
  ledger.drop(kind, states_ + positions_);
  for (size_t layer = 0; layer < num_layers(); ++layer) {
    const size_t block = first_block() + layer;
    if (recomputes_) {
      recomputed_forward(rank, account, block);
    } else {
      block_forward(rank, account, block);
    }
  }
  touch(rank, kNormWeight);
  ledger.add(kind, states_ + stats_); // the last norm
  if (chunked_.is_wanted) {
    chunked_forward(rank, account);
  } else {
    head_forward(rank, account);
  }
}

void GptProgram::head_forward(Rank& rank, Account& account) const {
  Ledger& ledger = account.device;
  constexpr Kind kind = Kind::Activations;
  touch(rank, head());
  account.clock.compute(head_flops_);
  ledger.add(kind, logits_);
  if (casts_logits_) {
    ledger.add(kind, loss_logits_);
  }
  ledger.add(kind, loss_logits_); // log-softmax
  ledger.drop(kind, logits_ + (casts_logits_ ? loss_logits_ : 0));
}

/// Leaves the gradients of the norm's output and of the head's weight, and not
/// that output.
void GptProgram::chunked_forward(Rank& rank, Account& account) const {
  Ledger& ledger = account.device;
  constexpr Kind kind = Kind::Activations;
  touch(rank, head());
  ledger.add(kind, chunked_.hidden_gradient);
  ledger.add(kind, chunked_.weight_gradient);
  ledger.add(kind, chunked_.held);
  account.clock.compute(3 * head_flops_);
  ledger.drop(kind, chunked_.held + states_);
}

/// The block's input is allocated already and stays. Adds the block's output
/// and what the block saves for backward.
void GptProgram::block_forward(Rank& rank, Account& account, size_t unit)
    const {
  Ledger& ledger = account.device;
  constexpr Kind kind = Kind::Activations;
  rank.touch(unit);
  ledger.add(kind, states_ + stats_); // norm1
  account.clock.compute(3 * square_flops_);
  ledger.add(kind, 3 * states_); // qkv
  account.clock.compute(attention_flops_);
  ledger.add(kind, states_ + log_sum_exp_); // attention
  account.clock.compute(square_flops_);
  ledger.add(kind, 2 * states_); // out, and its sum with the input
  ledger.drop(kind, states_);
  ledger.add(kind, states_ + stats_); // norm2
  account.clock.compute(4 * square_flops_);
  ledger.add(kind, 4 * states_); // up
  ledger.add(kind, 4 * states_); // gelu
  account.clock.compute(4 * square_flops_);
  ledger.add(kind, 2 * states_); // down, and the output
  ledger.drop(kind, states_);
}

/// Frees what block_forward() saved, and the block's input. The gradient of the
/// output is allocated already; leaves the gradient of the input.
void GptProgram::block_backward(Rank& rank, Account& account, size_t unit)
    const {
  Ledger& ledger = account.device;
  constexpr Kind kind = Kind::Activations;
  using namespace block_param; // NOLINT: names of one enum
  rank.touch(unit);
  account.clock.compute(8 * square_flops_);
  ledger.add(kind, 4 * states_); // down
  rank.add_gradient(unit, kDownBias);
  rank.add_gradient(unit, kDownWeight);
  ledger.drop(kind, 4 * states_); // what gelu gave
  ledger.add(kind, 4 * states_); // gelu
  ledger.drop(kind, 8 * states_);
  account.clock.compute(8 * square_flops_);
  ledger.add(kind, states_); // up
  rank.add_gradient(unit, kUpBias);
  rank.add_gradient(unit, kUpWeight);
  ledger.drop(kind, 5 * states_);
  ledger.add(kind, states_); // norm2
  rank.add_gradient(unit, kNorm2Weight);
  rank.add_gradient(unit, kNorm2Bias);
  ledger.drop(kind, 2 * states_ + stats_);
  // Added to the gradient of the output, which recompute() still holds.
  ledger.drop(kind, recomputes_ ? 0 : states_);
  account.clock.compute(2 * square_flops_);
  ledger.add(kind, states_); // out
  rank.add_gradient(unit, kOutBias);
  rank.add_gradient(unit, kOutWeight);
  account.clock.compute(2 * attention_flops_);
  ledger.add(kind, 3 * states_); // attention
  ledger.drop(kind, 5 * states_ + log_sum_exp_);
  ledger.add(kind, 3 * states_); // its parts as one, laid out as qkv was
  ledger.drop(kind, 3 * states_);
  account.clock.compute(6 * square_flops_);
  ledger.add(kind, states_); // qkv
  rank.add_gradient(unit, kQkvBias);
  rank.add_gradient(unit, kQkvWeight);
  ledger.drop(kind, 4 * states_);
  ledger.add(kind, states_); // norm1
  rank.add_gradient(unit, kNorm1Weight);
  rank.add_gradient(unit, kNorm1Bias);
  ledger.drop(kind, 2 * states_ + stats_);
  // Added to the gradient of the input.
  ledger.drop(kind, recomputes_ ? 2 * states_ : states_);
  rank.finish_unit(unit);
}

/// Runs the block with a graph, which is then freed: the input and the output
/// stay.
void GptProgram::recomputed_forward(Rank& rank, Account& account, size_t unit)
    const {
  Ledger& ledger = account.device;
  ledger.add(Kind::Activations, random_state_);
  block_forward(rank, account, unit);
  ledger.drop(Kind::Activations, 15 * states_ + 2 * stats_ + log_sum_exp_);
}

void GptProgram::recomputed_backward(Rank& rank, Account& account, size_t unit)
    const {
  Ledger& ledger = account.device;
  ledger.add(Kind::Activations, random_state_); // of now
  block_forward(rank, account, unit);
  ledger.drop(Kind::Activations, random_state_ + states_); // and the output
  block_backward(rank, account, unit);
  ledger.drop(Kind::Activations, random_state_); // of then
}

/// Leaves the gradient of the norm's output, and not that output.
void GptProgram::head_backward(Rank& rank, Account& account) const {
  Ledger& ledger = account.device;
  constexpr Kind kind = Kind::Activations;
  ledger.add(kind, loss_logits_); // of the log-softmax
  ledger.add(kind, loss_logits_); // of its input
  ledger.drop(kind, 2 * loss_logits_);
  if (casts_logits_) {
    ledger.add(kind, logits_);
    ledger.drop(kind, loss_logits_);
  }
  touch(rank, head());
  account.clock.compute(2 * head_flops_);
  ledger.add(kind, states_); // head
  add_gradient(rank, head());
  finish_split(rank, head());
  ledger.drop(kind, logits_ + states_);
}

/// Hands out what forward has made.
void GptProgram::chunked_backward(Rank& rank, Account& account) const {
  Ledger& ledger = account.device;
  constexpr Kind kind = Kind::Activations;
  if (chunked_.hidden_gradient != states_) { // is cast
    ledger.add(kind, states_);
    ledger.drop(kind, chunked_.hidden_gradient);
  }
  if (!chunked_.casts_weight_gradient) {
    ledger.drop(kind, chunked_.weight_gradient); // it becomes the gradient
  }
  add_gradient(rank, head());
  if (chunked_.casts_weight_gradient) {
    ledger.drop(kind, chunked_.weight_gradient);
  }
  finish_split(rank, head());
}

void GptProgram::backward(Rank& rank, Account& account) const {
  Ledger& ledger = account.device;
  constexpr Kind kind = Kind::Activations;
  using namespace root_param; // NOLINT: names of one enum
  if (chunked_.is_wanted) {
    chunked_backward(rank, account);
  } else {
    head_backward(rank, account);
  }
  touch(rank, kNormWeight);
  ledger.add(kind, states_); // norm
  add_gradient(rank, kNormWeight);
  add_gradient(rank, kNormBias);
  ledger.drop(kind, 2 * states_ + stats_);
  for (size_t layer = num_layers(); layer-- > 0;) {
    const size_t block = first_block() + layer;
    if (recomputes_) {
      recomputed_backward(rank, account, block);
    } else {
      block_backward(rank, account, block);
    }
  }
  rank.touch(root());
  ledger.add(kind, positions_);
  add_gradient(rank, kPositions);
  ledger.drop(kind, positions_ + position_ids_);
  add_gradient(rank, kTokens);
  ledger.drop(kind, states_);
  finish_split(rank, kTokens);
  rank.finish_unit(root());
  ledger.drop(kind, 2 * tokens_);
}

} // namespace tessera::plan
