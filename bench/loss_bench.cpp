// The last layer of a language model and its loss, forward and backward:
// linear_cross_entropy beside the same by logits, and the products alone.
//
//   loss_bench
//   loss_bench cuda
//
// 1,024 tokens of width 256 and 32,768 words, in float32 on one thread; on a
// GPU 8,192 tokens of width 768 and 50,304 words, in bfloat16. The limit is the
// three products of matrices that nobody can avoid. The sides take turns.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <functional>
#include <string>

#include "harness.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 5; // per round
constexpr int kCallsARepeat = 3;

/// The same sizes as in bench/peers/loss.py.
struct Layer {
  explicit Layer(const torch::Device& device) {
    torch::manual_seed(0);
    const bool is_cuda = device.is_cuda();
    const int64_t tokens = is_cuda ? 8192 : 1024;
    const int64_t width = is_cuda ? 768 : 256;
    const int64_t words = is_cuda ? 50304 : 32768;
    const auto dtype = is_cuda ? torch::kBFloat16 : torch::kFloat;
    const auto make = [&](int64_t rows) {
      return (torch::randn({rows, width}, device) * 0.1)
          .to(dtype)
          .requires_grad_();
    };
    hidden = make(tokens);
    weight = make(words);
    targets = torch::randint(0, words, {tokens}, torch::kLong).to(device);
  }

  void drop_gradients() const {
    hidden.mutable_grad().reset();
    weight.mutable_grad().reset();
  }

  void by_chunks() const {
    tessera::linear_cross_entropy(hidden, weight, targets).backward();
    drop_gradients();
  }

  void by_logits() const {
    torch::cross_entropy_loss(
        torch::linear(hidden, weight).to(torch::kFloat), targets)
        .backward();
    drop_gradients();
  }

  /// `logits` stands for the gradient of the logits too.
  void products(const torch::Tensor& logits) const {
    const torch::NoGradGuard no_grad;
    torch::Tensor out = logits;
    torch::mm_out(out, hidden, weight.t());
    torch::mm(logits, weight);
    torch::mm(logits.t(), hidden);
  }

  torch::Tensor hidden;
  torch::Tensor weight;
  torch::Tensor targets;
};

/// Milliseconds per call: the median of a few.
double measure(
    const torch::Device& device,
    int calls,
    const std::function<void()>& call) {
  bench::Samples times;
  for (int i = 0; i < calls; ++i) {
    times.push_back(bench::milliseconds([&] {
      call();
      bench::synchronize(device);
    }));
  }
  return bench::median(times);
}

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const torch::Device device(arguments.word(0, "cpu"));
  at::set_num_threads(1);
  const Layer layer(device);
  const std::string place = device.is_cuda() ? "cuda" : "cpu";
  if (!device.is_cuda()) {
    bench::Row memory{
        "loss/peak-memory/" + place,
        "MB",
        {bench::extra_megabytes([&] { layer.by_chunks(); })}};
    memory.peers["logits"] = {
        bench::extra_megabytes([&] { layer.by_logits(); })};
    bench::print(memory);
  }
  const auto logits = torch::empty(
      {layer.hidden.size(0), layer.weight.size(0)},
      layer.hidden.options().requires_grad(false));
  bench::Row row{"loss/linear-cross-entropy/" + place, "ms", {}};
  const int calls = arguments.times(kCallsARepeat);
  for (int repeat = 0; repeat <= arguments.times(kRepeats); ++repeat) {
    const double ours = measure(device, calls, [&] { layer.by_chunks(); });
    const double whole = measure(device, calls, [&] { layer.by_logits(); });
    const double products =
        measure(device, calls, [&] { layer.products(logits); });
    if (repeat > 0) { // the first warms up
      row.ours.push_back(ours);
      row.peers["logits"].push_back(whole);
      row.limit.push_back(products);
    }
  }
  bench::print(row);
  return 0;
}
