// Python's values of Muon over 10 steps; muon_goldens.py writes them.
#include <tessera/optim/muon.h>

#include <bit>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "checkpoint/disk/python.h"
#include "checkpoint/support.h"
#include "optim/muon_model.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

constexpr int kGoldenSteps = 10;
const std::vector<std::vector<int64_t>> kShapes{
    {12, 5},
    {5, 12},
    {7, 7},
    {19, 8},
    {8, 17}}; // as muon_goldens.py

/// What Python had after the last step.
struct Golden {
  std::string name;
  StateDict group;
  std::map<int64_t, at::Tensor> params;
  std::map<int64_t, std::map<std::string, at::Tensor>> state;
};

std::ostream& operator<<(std::ostream& out, const Golden& golden) {
  return out << golden.name;
}

struct Goldens {
  std::vector<at::Tensor> products; // by shape
  std::vector<Golden> cases;
  at::Tensor losses; // of the network
};

/// The bits of float32, in hexadecimal.
at::Tensor numbers_in(std::istream& words) {
  std::vector<float> numbers;
  uint32_t bits = 0;
  while (words >> std::hex >> bits) {
    numbers.push_back(std::bit_cast<float>(bits));
  }
  return torch::tensor(numbers, at::kFloat).to(at::kDouble);
}

StateValue value_in(std::istream& words) {
  std::string kind;
  std::string word;
  words >> kind;
  if (kind == "n") {
    return nullptr;
  }
  if (kind == "l") {
    StateList list;
    while (words >> word) {
      list.emplace_back(std::strtod(word.c_str(), nullptr));
    }
    return list;
  }
  words >> word;
  return kind == "b" ? StateValue(word == "1")
      : kind == "i"  ? StateValue(int64_t{std::atoll(word.c_str())})
      : kind == "s"  ? StateValue(word)
                     : StateValue(std::strtod(word.c_str(), nullptr));
}

Goldens read_goldens(const std::string& path = TESSERA_MUON_GOLDENS) {
  std::ifstream file(path);
  Goldens goldens;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string what;
    std::string key;
    int64_t id = 0;
    words >> what;
    if (what == "products") {
      words >> id;
      goldens.products.push_back(numbers_in(words));
    } else if (what == "case") {
      words >> goldens.cases.emplace_back().name;
    } else if (what == "group") {
      words >> key;
      goldens.cases.back().group.set(key, value_in(words));
    } else if (what == "param") {
      words >> id;
      goldens.cases.back().params[id] = numbers_in(words);
    } else if (what == "state") {
      words >> id >> key;
      goldens.cases.back().state[id][key] = numbers_in(words);
    } else if (what == "losses") {
      goldens.losses = numbers_in(words);
    }
  }
  return goldens;
}

/// The options of muon_goldens.py, by name.
std::map<std::string, MuonOptions> options_by_name() {
  const NsCoefficients other{2, -1.5, 0.5};
  return {
      {"plain", {}},
      {"lr", 0.02},
      {"no_nesterov", MuonOptions(0.02).nesterov(false)},
      {"momentum", MuonOptions(0.02).momentum(0.5)},
      {"no_momentum", MuonOptions(0.02).momentum(0)},
      {"weight_decay", MuonOptions(0.02).weight_decay(0.5)},
      {"original", MuonOptions(0.02).adjust_lr_fn("original")},
      {"match_rms_adamw", MuonOptions(0.02).adjust_lr_fn("match_rms_adamw")},
      {"ns_coefficients", MuonOptions(0.02).ns_coefficients(other).ns_steps(7)},
      {"eps", MuonOptions(0.02).eps(100)},
      {"all",
       MuonOptions(0.02)
           .weight_decay(0.5)
           .momentum(0.75)
           .nesterov(false)
           .ns_coefficients(other)
           .eps(2)
           .ns_steps(3)
           .adjust_lr_fn("match_rms_adamw")}};
}

/// As in muon_goldens.py.
at::Tensor numbers(at::IntArrayRef sizes, int64_t first) {
  const auto i = torch::arange(c10::multiply_integers(sizes), torch::kLong);
  return (7 * i * i + 3 * i + first)
      .remainder(61)
      .sub(30)
      .reshape(sizes)
      .to(at::kFloat)
      .div(16);
}

at::Tensor products(at::IntArrayRef sizes) {
  at::Tensor x = numbers(sizes, 1).to(at::kBFloat16) / 16;
  x = sizes[0] > sizes[1] ? x.t() : x;
  const auto gram = torch::matmul(x, x.t());
  const auto update = torch::addmm(gram, gram, gram, -1.5, 0.5);
  return torch::cat(
      {gram.flatten(),
       update.flatten(),
       torch::addmm(x, update, x, 2).flatten()});
}

/// On another processor sums of bfloat16 products may be rounded elsewhere,
/// which ten steps of an iteration make visible.
bool rounds_as_where_they_were_made(const Goldens& goldens) {
  for (size_t i = 0; i < kShapes.size(); ++i) {
    const auto mine = products(kShapes[i]).to(at::kDouble);
    EXPECT_TRUE(torch::allclose(mine, goldens.products[i], 0.02, 0.02));
    if (!at::equal(mine, goldens.products[i])) {
      return false;
    }
  }
  return true;
}

void expect_same(
    const at::Tensor& found,
    const at::Tensor& wanted,
    bool to_the_bit,
    const std::string& what) {
  const auto flat = found.detach().to(at::kDouble).flatten();
  ASSERT_EQ(flat.numel(), wanted.numel()) << what;
  // Elsewhere: updates of at most 0.2, of which a tenth may differ.
  const double tolerance = to_the_bit ? 0 : 0.02;
  EXPECT_LE((flat - wanted).abs().max().item<double>(), tolerance) << what;
}

/// As Python was when it made the numbers.
class OneThread {
 public:
  OneThread() {
    at::set_num_threads(1);
  }
  ~OneThread() {
    at::set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int before_ = at::get_num_threads();
};

void expect_values_of(const Golden& golden, bool to_the_bit) {
  SCOPED_TRACE(golden.name);
  const OneThread one_thread;
  std::vector<at::Tensor> params;
  for (const auto& shape : kShapes) {
    params.push_back(numbers(shape, 3).requires_grad_());
  }
  Muon optimizer(params, options_by_name().at(golden.name));
  for (int step = 0; step < kGoldenSteps; ++step) {
    for (size_t i = 0; i < params.size(); ++i) {
      const bool misses = i == 1 && step % 4 == 0;
      params[i].mutable_grad() = misses
          ? at::Tensor()
          : numbers(params[i].sizes(), 5 * step) + params[i].detach() / 4;
    }
    optimizer.step();
  }

  const auto dict = optimizer.state_dict();
  const StateDict& group = dict.at("param_groups").list().at(0).dict();
  auto keys = golden.group.keys();
  keys.emplace_back("params");
  EXPECT_EQ(group.keys(), keys); // in Python's order
  for (const auto& [key, value] : golden.group) {
    EXPECT_EQ(group.at(key), value) << key.text();
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const auto id = static_cast<int64_t>(i);
    const std::string label = "parameter " + std::to_string(i);
    expect_same(params[i], golden.params.at(id), to_the_bit, label);
    const StateDict& state = dict.at("state").dict().at(id).dict();
    EXPECT_EQ(state.size(), golden.state.at(id).size());
    for (const auto& [name, wanted] : golden.state.at(id)) {
      expect_same(
          state.at(name).tensor(), wanted, to_the_bit, label + ", " + name);
    }
  }
}

class MuonGoldenTest : public ::testing::TestWithParam<Golden> {};

TEST_P(MuonGoldenTest, ProducesPyTorchValues) {
  const bool to_the_bit = rounds_as_where_they_were_made(read_goldens());
  if (!to_the_bit) {
    std::cout << "this processor rounds products of bfloat16 otherwise than "
                 "that of the goldens: compared within 0.02\n";
  }
  expect_values_of(GetParam(), to_the_bit);
}

INSTANTIATE_TEST_SUITE_P(
    Python,
    MuonGoldenTest,
    ::testing::ValuesIn(read_goldens().cases),
    [](const auto& test) { return test.param.name; });

/// The network of muon_goldens.py.
struct NetworkImpl : torch::nn::Module {
  NetworkImpl()
      : first(register_parameter("first", numbers({16, 12}, 2) / 8)),
        second(register_parameter("second", numbers({7, 16}, 4) / 8)) {}
  at::Tensor loss() const {
    const auto hidden = torch::tanh(torch::linear(numbers({10, 12}, 6), first));
    return torch::linear(hidden, second).square().mean();
  }
  at::Tensor first;
  at::Tensor second;
};
TORCH_MODULE(Network);

/// All ranks have the same data, so the mean of their gradients is Python's.
void expect_losses(const at::Tensor& wanted, ShardLayout layout) {
  const OneThread one_thread;
  Network network;
  fully_shard(network, FullyShardOptions().layout(layout));
  Muon optimizer(parameters(network), MuonOptions(0.02));
  for (int64_t step = 0; step < wanted.numel(); ++step) {
    optimizer.zero_grad();
    const auto loss = network->loss();
    loss.backward();
    optimizer.step();
    EXPECT_EQ(loss.item<float>(), wanted[step].item<float>()) << step;
  }
}

/// Beside the Python of this LibTorch, on this processor.
TEST(MuonLiveTest, EqualsPythonBitByBitAloneAndSharded) {
  if (checkpoint::python_with_torch().empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  const testing::RanksOptions patient{
      .size = 4,
      .timeout = std::chrono::milliseconds(60000),
      .test_timeout = std::chrono::milliseconds(100000)};
  testing::on_ranks(patient, [](const Group& world) {
    const testing::TempFolder folder(world);
    if (world.rank() == 0) {
      const auto outcome = checkpoint::run_python(
          checkpoint::python_with_torch(),
          TESSERA_MUON_SCRIPT,
          {folder / "now.txt"});
      EXPECT_EQ(outcome.status, 0) << outcome.output;
    }
    world.barrier();
    const Goldens now = read_goldens(folder / "now.txt");
    ASSERT_EQ(now.cases.size(), options_by_name().size());
    for (const Golden& golden : now.cases) {
      expect_values_of(golden, /*to_the_bit=*/true);
    }
    ASSERT_EQ(now.losses.numel(), 2 * kGoldenSteps);
    EXPECT_LT(now.losses[-1].item<float>(), now.losses[0].item<float>() / 2);
    expect_losses(now.losses, ShardLayout::Flat);
    expect_losses(now.losses, ShardLayout::Dim0);
  });
}

TEST(MuonGoldenFileTest, HasEveryCase) {
  EXPECT_EQ(read_goldens().cases.size(), options_by_name().size());
  EXPECT_EQ(read_goldens().products.size(), kShapes.size());
}

} // namespace
} // namespace tessera::optim
