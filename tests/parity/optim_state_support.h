// What PyTorch's tests of optimizer state do repeatedly: train a model, compare
// optimizer state, and carry it from one model to another.
#pragma once

#include <tessera/transfer/optim_state.h>
#include <tessera/transfer/state_dict_type.h>

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "parity/support.h"

namespace tessera::parity {

/// Iterations between checks.
inline constexpr int kIterations = 3;

/// A model and its optimizer.
struct Trainee {
  std::shared_ptr<torch::nn::Module> module;
  std::unique_ptr<torch::optim::Optimizer> optim;
  /// What the optimizer was built on; none for the transformer, as in PyTorch.
  std::optional<OptimInput> optim_input;
  /// Draws an input and returns the loss.
  std::function<at::Tensor()> loss;

  StateDict state_dict() const;
  void load_state_dict(const StateDict& osd);
};

struct NestedInit {
  enum class Wrapping { None, Usual, Alternative };
  Wrapping wrapping = Wrapping::Usual;
  std::optional<Group> group = std::nullopt; // the world
  /// block1 in one group, block2 and block0 in another with weight decay; the
  /// root's bias in none.
  bool multi_groups = false;
  /// Number the parameters from the last to the first, in each group.
  bool reversed = false;
  bool use_orig_params = false;
};

/// NestedModel and Adam.
Trainee init_nested(const NestedInit& init);
/// The transformer as five units, and Adam.
Trainee init_transformer(const std::optional<Group>& group);

/// Trains with the same inputs on all ranks, so that averaging changes nothing;
/// returns the losses.
std::vector<double> step_model(Trainee& trainee, int iterations = kIterations);

/// Rank 0's.
StateDict broadcast_osd(const StateDict& osd, const Group& group);

/// Any: entries are only known by their values, since one side has names and
/// the other numbers.
enum class Keys { Same, Any };

/// Expects the same "state". Gathers what is sharded in `actual`: collective
/// then.
void expect_same_state(
    const StateDict& actual,
    const StateDict& expected,
    Keys keys = Keys::Same);
/// Expects the same groups with the same options and, with Keys::Same, the same
/// "params".
void expect_same_param_groups(
    const StateDict& actual,
    const StateDict& expected,
    Keys keys = Keys::Same);
/// Both.
void expect_same_osd(
    const StateDict& actual,
    const StateDict& expected,
    Keys keys = Keys::Same);

/// How optimizer state gets from one model to another.
struct LoadCase {
  enum class Model { Nested, Transformer };
  /// Which ranks of the second model number their parameters in reverse.
  enum class Reversed { None, OddRanks, OddRanksOfGroup };

  Model model = Model::Nested;
  bool multi_groups = false;
  /// The second model lives on ranks 0 and 2 alone.
  bool halve = false;
  Reversed reversed = Reversed::None;
  /// Of the second model.
  bool wrap_alt = false;
  bool use_orig_params = false;
};

enum class OsdMethod { Broadcast, Scatter, Flatten };

/// Through the functions that are named after what they do.
void check_load_legacy(
    const Group& world,
    const LoadCase& load,
    OsdMethod method,
    bool use_optim_input);

/// Through optim_state_dict() and optim_state_dict_to_load().
void check_load_with_osd(
    const Group& world,
    const LoadCase& load,
    const StateDictSettings& settings);

} // namespace tessera::parity
