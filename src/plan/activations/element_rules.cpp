// Operators whose backward needs their arguments or results as they are:
// functions of elements, reductions, gathers and scatters.
#include <algorithm>
#include <array>
#include <optional>

#include "plan/activations/operator_rules.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

/// What autograd saves, as bits. Arguments are counted among the tensors.
enum Saves : uint8_t {
  kNothing = 0,
  kFirst = 1,
  kSecond = 2,
  kThird = 4,
  kResult = 8,
  kFactors = 16, // each of two if the other one needs a gradient
  kSecondResult = 32, // where the elements came from
  kAllButFirst = 64,
};

struct ElementRule {
  std::string_view name;
  int saves = kNothing;
  Flow first = Flow::Make; // the gradient of the first argument
  Flow others = Flow::Make;
  int temporaries = 0; // in backward, in sizes of the result
};

constexpr Flow kPass = Flow::Pass;
constexpr Flow kMake = Flow::Make;

/// Arguments are broadcast to the size of the result.
constexpr std::array kElementRules{
    ElementRule{"abs", kFirst, kMake, kMake, 1},
    ElementRule{"add", kNothing, kPass, kPass},
    ElementRule{"atan", kFirst, kMake, kMake, 1},
    ElementRule{"celu", kFirst},
    ElementRule{"clamp", kFirst, kMake, kMake, 1},
    ElementRule{"clamp_max", kFirst, kMake, kMake, 1},
    ElementRule{"clamp_min", kFirst, kMake, kMake, 1},
    ElementRule{"copy", kNothing, kPass, kPass},
    ElementRule{"cos", kFirst, kMake, kMake, 1},
    ElementRule{"div", kFactors | kSecond, kMake, kMake},
    ElementRule{"divide", kFactors | kSecond, kMake, kMake},
    ElementRule{"elu", kFirst},
    ElementRule{"erf", kFirst, kMake, kMake, 2},
    ElementRule{"exp", kResult},
    ElementRule{"exp2", kResult, kMake, kMake, 1},
    ElementRule{"expm1", kResult, kMake, kMake, 1},
    ElementRule{"gelu", kFirst},
    ElementRule{"hardsigmoid", kFirst},
    ElementRule{"hardswish", kFirst},
    ElementRule{"hardtanh", kFirst},
    ElementRule{"leaky_relu", kFirst},
    ElementRule{"log", kFirst},
    ElementRule{"log1p", kFirst, kMake, kMake, 1},
    ElementRule{"log2", kFirst, kMake, kMake, 1},
    ElementRule{"log_sigmoid", kFirst | kResult},
    ElementRule{"masked_fill", kSecond},
    ElementRule{"maximum", kFirst | kSecond, kMake, kMake, 1},
    ElementRule{"minimum", kFirst | kSecond, kMake, kMake, 1},
    ElementRule{"mish", kFirst},
    ElementRule{"mul", kFactors},
    ElementRule{"multiply", kFactors},
    ElementRule{"neg"},
    ElementRule{"pow", kFirst | kSecond, kMake, kMake, 2},
    ElementRule{"reciprocal", kResult, kMake, kMake, 1},
    ElementRule{"relu", kResult},
    ElementRule{"relu6", kFirst},
    ElementRule{"rsqrt", kResult, kMake, kMake, 2},
    ElementRule{"rsub", kNothing, kMake, kPass},
    ElementRule{"selu", kFirst},
    ElementRule{"sigmoid", kResult},
    ElementRule{"silu", kFirst},
    ElementRule{"sin", kFirst, kMake, kMake, 1},
    ElementRule{"softplus", kFirst},
    ElementRule{"sqrt", kResult, kMake, kMake, 1},
    ElementRule{"square", kFirst, kMake, kMake, 2},
    ElementRule{"sub", kNothing, kPass, kMake},
    ElementRule{"subtract", kNothing, kPass, kMake},
    ElementRule{"tanh", kResult},
    ElementRule{"threshold", kFirst},
    ElementRule{"where", kFirst},
};

/// Results have sizes of their own.
constexpr std::array kOtherRules{
    ElementRule{"_softmax", kResult},
    ElementRule{"_weight_norm", kFirst | kSecond},
    ElementRule{"amax", kFirst | kResult, kMake, kMake, 0},
    ElementRule{"amin", kFirst | kResult, kMake, kMake, 0},
    ElementRule{"avg_pool1d", kFirst},
    ElementRule{"avg_pool2d", kFirst},
    ElementRule{"avg_pool3d", kFirst},
    ElementRule{"cat", kNothing, kPass, kPass},
    ElementRule{"clone", kNothing, kPass},
    ElementRule{"complex"},
    ElementRule{"concat", kNothing, kPass, kPass},
    ElementRule{"constant_pad_nd"},
    ElementRule{"cumsum"},
    ElementRule{"embedding_bag", kSecond},
    ElementRule{"fft_fft"},
    ElementRule{"fft_fftn"},
    ElementRule{"fft_ifft"},
    ElementRule{"fft_irfft"},
    ElementRule{"fft_rfft", kFirst},
    ElementRule{"flip"},
    ElementRule{"gather", kFirst | kSecond},
    ElementRule{"glu", kFirst},
    ElementRule{"im2col"},
    ElementRule{"index", kAllButFirst},
    ElementRule{"index_add", kSecond | kThird, kPass, kMake},
    ElementRule{"index_select", kSecond},
    ElementRule{"linalg_vector_norm", kFirst | kResult, kMake, kMake, 0},
    ElementRule{"logsumexp", kFirst | kResult},
    ElementRule{"max", kSecondResult},
    ElementRule{"mean"},
    ElementRule{"min", kSecondResult},
    ElementRule{"norm", kFirst | kResult},
    ElementRule{"pad"},
    ElementRule{"pixel_shuffle"},
    ElementRule{"prelu", kFirst | kSecond},
    ElementRule{"prod", kFirst | kResult},
    ElementRule{"repeat"},
    ElementRule{"repeat_interleave"},
    ElementRule{"roll"},
    ElementRule{"scatter", kSecond},
    ElementRule{"scatter_add", kSecond, kPass, kMake},
    ElementRule{"sort", kSecondResult},
    ElementRule{"stack", kNothing, kPass, kPass},
    ElementRule{"std", kFirst | kResult},
    ElementRule{"sum", kNothing, kPass},
    ElementRule{"topk", kSecondResult},
    ElementRule{"tril"},
    ElementRule{"triu"},
    ElementRule{"upsample_bicubic2d"},
    ElementRule{"upsample_bilinear2d"},
    ElementRule{"upsample_nearest1d"},
    ElementRule{"upsample_nearest2d"},
    ElementRule{"var", kFirst},
};

/// Their results depend on an argument's shape, or do not change with its
/// elements.
constexpr std::array<std::string_view, 16> kWithoutGradient{
    "bernoulli",
    "ceil",
    "empty_like",
    "floor",
    "full_like",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "rand_like",
    "randn_like",
    "round",
    "sign",
    "trunc",
    "zeros_like"};

template <class Rules>
const ElementRule* find(const Rules& rules, std::string_view name) {
  const auto found =
      std::find_if(rules.begin(), rules.end(), [&](const ElementRule& rule) {
        return rule.name == name;
      });
  return found == rules.end() ? nullptr : &*found;
}

std::vector<ValueId> saved_by(
    const ElementRule& rule,
    const OperatorCall& call,
    const std::vector<ValueId>& results) {
  const std::vector<ValueId>& tensors = call.tensors();
  std::vector<ValueId> saved;
  const auto save_if = [&](bool is_saved, const auto& from, size_t index) {
    if (is_saved && index < from.size()) {
      saved.push_back(from[index]);
    }
  };
  const bool has_two = tensors.size() == 2 && (rule.saves & kFactors) != 0;
  const bool saves_first = (rule.saves & kFirst) != 0 ||
      (has_two && call.needs_gradient(tensors[1]));
  const bool saves_second = (rule.saves & kSecond) != 0 ||
      (has_two && call.needs_gradient(tensors[0]));
  save_if(saves_first, tensors, 0);
  save_if(saves_second, tensors, 1);
  save_if((rule.saves & kThird) != 0, tensors, 2);
  save_if((rule.saves & kResult) != 0, results, 0);
  save_if((rule.saves & kSecondResult) != 0, results, 1);
  for (size_t i = 1; (rule.saves & kAllButFirst) != 0 && i < tensors.size();
       ++i) {
    saved.push_back(tensors[i]);
  }
  return saved;
}

/// How the gradient flows to an argument that is broadcast, or in another
/// dtype.
Flow broadcast_flow(
    Flow flow,
    const TensorShape& argument,
    const TensorShape& result) {
  if (argument.numel() != result.numel()) {
    return flow == Flow::Pass ? Flow::Make : Flow::MakeFromProduct;
  }
  return argument.dtype == result.dtype ? flow : Flow::Make;
}

void apply(
    const ElementRule& rule,
    bool is_in_place,
    bool is_broadcast,
    OperatorCall& call) {
  const std::vector<ValueId>& tensors = call.tensors();
  std::vector<ValueId> results;
  for (const TensorShape& shape : call.shapes()) {
    const bool is_first = results.empty();
    results.push_back(
        is_in_place && is_first && !tensors.empty()
            ? call.detached(tensors[0], shape)
            : call.make(shape));
  }
  GradNode node{.results = results, .inputs = {}, .saved = {}};
  for (size_t i = 0; i < tensors.size() && !results.empty(); ++i) {
    const Flow flow = i == 0 ? rule.first : rule.others;
    node.inputs.push_back(
        {tensors[i],
         is_broadcast ? broadcast_flow(
                            flow, call.shape(tensors[i]), call.shapes().front())
                      : flow});
  }
  node.saved = saved_by(rule, call, results);
  if (!results.empty()) {
    node.temporary = times(rule.temporaries, call.shapes().front().bytes());
  }
  call.record(std::move(node));
  for (const ValueId result : results) {
    call.give(result);
  }
}

} // namespace

bool apply_element_rule(std::string_view name, OperatorCall& call) {
  const bool is_in_place =
      name.size() > 1 && name.ends_with('_') && !name.ends_with("__");
  if (is_in_place) {
    name.remove_suffix(1);
  }
  if ((name == "max" || name == "min") && call.tensors().size() == 2) {
    name = "maximum"; // of two tensors
  }
  if (const ElementRule* rule = find(kElementRules, name)) {
    apply(*rule, is_in_place, true, call);
    return true;
  }
  if (const ElementRule* rule = find(kOtherRules, name)) {
    apply(*rule, is_in_place, false, call);
    return true;
  }
  if (std::find(kWithoutGradient.begin(), kWithoutGradient.end(), name) !=
      kWithoutGradient.end()) {
    for (const TensorShape& shape : call.shapes()) {
      call.give(call.make(shape));
    }
    return true;
  }
  return false;
}

} // namespace tessera::plan
