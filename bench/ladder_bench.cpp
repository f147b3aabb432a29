// A training step of a GPT on a GPU, one improvement after the other: the steps
// of docs/fast-on-a-gpu.md.
//
//   ladder_bench 124M cuda
//
// Each rung keeps what the rungs before it have. All clip. The rungs take
// turns, a handful of steps at a time.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "harness.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 5;
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;

/// Each one with those above it.
enum class Rung {
  Float32, // a plain loop with LibTorch's own means
  BFloat16, // fully_shard computes in bfloat16, from float32 shards
  Linear, // torch::linear, and chunk() for attention
  Loss, // linear_cross_entropy
  AdamW, // tessera::optim::AdamW
  Cast, // keep_cast_shards
  Captured, // CapturedStep
};
constexpr std::array kNames{
    "1-float32",
    "2-bfloat16",
    "3-linear",
    "4-loss",
    "5-adamw",
    "6-cast",
    "7-captured"};

/// Forward of a block as one writes it first.
torch::Tensor block_forward(bench::BlockImpl& block, torch::Tensor x) {
  const auto qkv = block.qkv->forward(block.norm1->forward(x))
                       .unflatten(-1, {3, block.heads, -1})
                       .permute({2, 0, 3, 1, 4})
                       .unbind(0);
  const auto attended = torch::scaled_dot_product_attention(
      qkv[0],
      qkv[1],
      qkv[2],
      {},
      /*dropout_p=*/0.0,
      /*is_causal=*/true);
  x = x + block.out->forward(attended.transpose(1, 2).flatten(2));
  return x +
      block.down->forward(
          torch::gelu(block.up->forward(block.norm2->forward(x))));
}

torch::Tensor hidden_of(bench::Gpt& model, const torch::Tensor& ids) {
  auto x = model->tokens(ids) +
      model->positions(torch::arange(ids.size(1), ids.device()));
  for (const auto& block : *model->blocks) {
    x = block_forward(*block->as<bench::Block>(), x);
  }
  return model->norm(x);
}

class Trainer {
 public:
  Trainer(const bench::Setting& setting, Rung rung)
      : rung_(rung), device_(setting.device) {
    torch::manual_seed(0);
    model_ = bench::Gpt(setting.config);
    model_->to(device_);
    ids_ = setting.make_ids();
    if (has(Rung::BFloat16)) {
      shard();
    }
    const auto parameters = tessera::parameters(model_);
    if (has(Rung::AdamW)) {
      optimizer_ = std::make_unique<tessera::optim::AdamW>(parameters, 1e-4);
    } else {
      optimizer_ = std::make_unique<torch::optim::AdamW>(parameters, 1e-4);
    }
    if (has(Rung::Captured)) {
      captured_ = std::make_unique<tessera::CapturedStep>(
          model_,
          tessera::OptimizerRefs{*optimizer_},
          [this](const auto& inputs) { return step_on(inputs[0]); },
          tessera::CapturedStepOptions().require_capture(true));
    }
  }

  void step() {
    if (captured_) {
      (*captured_)({ids_});
    } else {
      step_on(ids_);
    }
  }

  /// Milliseconds per step.
  double measure(const tessera::Group& world, int steps) {
    bench::synchronize(device_);
    const double all = bench::milliseconds(world, [&] {
      for (int i = 0; i < steps; ++i) {
        step();
      }
      bench::synchronize(device_);
    });
    return all / steps;
  }

 private:
  bool has(Rung rung) const {
    return rung_ >= rung;
  }

  void shard() {
    const auto options = tessera::FullyShardOptions().mp_policy(
        tessera::MixedPrecisionPolicy()
            .param_dtype(torch::kBFloat16)
            .reduce_dtype(torch::kFloat)
            .keep_cast_shards(has(Rung::Cast)));
    for (const auto& block : *model_->blocks) {
      tessera::fully_shard(block, options);
    }
    tessera::fully_shard(model_, options);
  }

  torch::Tensor loss_on(const torch::Tensor& ids) {
    if (has(Rung::Loss)) {
      return bench::loss_of(model_, ids);
    }
    const auto logits = has(Rung::Linear)
        ? model_->forward(ids)
        : model_->head->forward(hidden_of(model_, ids));
    return torch::cross_entropy_loss(
        logits.view({-1, logits.size(-1)}).to(torch::kFloat), ids.view({-1}));
  }

  torch::Tensor step_on(const torch::Tensor& ids) {
    const auto loss = loss_on(ids);
    loss.backward();
    tessera::clip_grad_norm_(model_, 1.0);
    optimizer_->step();
    optimizer_->zero_grad();
    return loss.detach();
  }

  const Rung rung_;
  const torch::Device device_;
  bench::Gpt model_{nullptr};
  torch::Tensor ids_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<tessera::CapturedStep> captured_;
};

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const bench::Setting setting(arguments);
  const auto world = tessera::init();
  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<bench::Row> rows;
  for (size_t i = 0; i < kNames.size(); ++i) {
    trainers.push_back(
        std::make_unique<Trainer>(setting, static_cast<Rung>(i)));
    rows.push_back(
        {std::string("ladder/") + kNames[i] + "/" + setting.place(world),
         "ms",
         {}});
    for (int step = 0; step < arguments.times(kWarmUp); ++step) {
      trainers.back()->step();
    }
  }
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    for (size_t i = 0; i < kNames.size(); ++i) {
      rows[i].ours.push_back(
          trainers[i]->measure(world, arguments.times(kStepsARepeat)));
    }
  }
  for (const bench::Row& row : rows) {
    bench::print(row);
  }
  return 0;
}
