// What a .pt2 archive of torch.export says, as plain values: no JSON, no
// LibTorch. docs/formats/exported-program.md has the fields.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace tessera::exported {

using format::DType;

struct Graph;

struct None {
  bool operator==(const None&) const = default;
};

enum class Layout : uint8_t {
  Strided,
  SparseCoo,
  SparseCsr,
  SparseCsc,
  SparseBsr,
  SparseBsc,
  Mkldnn
};
enum class MemoryFormat : uint8_t {
  Contiguous,
  ChannelsLast,
  ChannelsLast3d,
  Preserve
};

struct Device {
  std::string type; // "cpu", "cuda"
  std::optional<int64_t> index;
};

/// The name of a tensor that an input or an earlier node gave.
struct TensorName {
  std::string name;
};

/// A number that is either written in the file or was given by a name.
template <class Number>
struct Symbolic {
  std::variant<std::string, Number> value; // the name, or the number
};
using SymbolicInt = Symbolic<int64_t>;
using SymbolicFloat = Symbolic<double>;
using SymbolicBool = Symbolic<bool>;

struct Complex {
  double real = 0;
  double imag = 0;
};

struct NestedGraph {
  std::string name;
  std::shared_ptr<const Graph> graph;
};

/// An object of a class that torch.export does not describe. It is never
/// opened; programs that use one are refused by name.
struct CustomObject {
  std::string name;
  std::string class_name;
};

/// The name of an operator that is itself an argument.
struct OperatorName {
  std::string name;
};

struct Argument;
using ArgumentMap = std::map<std::string, Argument>;

/// One `as_...` of the schema.
struct Argument {
  using Value = std::variant<
      None,
      TensorName,
      std::vector<TensorName>,
      std::vector<std::optional<TensorName>>, // as_optional_tensors
      std::optional<TensorName>, // as_optional_tensor
      std::vector<std::vector<TensorName>>, // as_nested_tensors
      int64_t,
      std::vector<int64_t>,
      std::vector<std::vector<int64_t>>, // as_int_lists
      double,
      std::vector<double>,
      std::vector<std::vector<double>>, // as_float_lists
      bool,
      std::vector<bool>,
      std::string,
      std::vector<std::string>,
      SymbolicInt,
      std::vector<SymbolicInt>,
      SymbolicFloat,
      std::vector<SymbolicFloat>,
      SymbolicBool,
      std::vector<SymbolicBool>,
      Complex,
      DType,
      Layout,
      MemoryFormat,
      Device,
      NestedGraph,
      CustomObject,
      OperatorName,
      std::shared_ptr<const ArgumentMap>>; // as_string_to_argument
  Value value;
};

struct NamedArgument {
  std::string name; // of the operator's schema; may be empty
  Argument argument;
  bool is_keyword = false;
};

/// A module whose forward a node came from.
struct ModuleFrame {
  std::string path; // "layers.0.attn"; empty for the root
  std::string
      class_name; // "transformers.models.llama.modeling_llama.LlamaAttention"
  int64_t call =
      0; // 1 inside the module's second call in one forward, and so on
};

struct Node {
  std::string name; // Python's, for errors; may be empty
  std::string target; // "torch.ops.aten.linear.default", "_operator.add"
  std::vector<NamedArgument> inputs;
  /// What the node gives, by name: tensors, lists of tensors, symbolic numbers,
  /// None.
  std::vector<Argument> outputs;
  /// From the root inwards; from `nn_module_stack`.
  std::vector<ModuleFrame> modules;
  std::string stack_trace; // Python's, for errors; may be empty
  /// Whether a higher-order operator gives one tensor and not a list of one.
  bool returns_single_tensor = false;
};

/// A number in a shape: written, or an expression of symbols as sympy's srepr()
/// prints it: "Mul(Integer(2), Symbol('s0', positive=True, integer=True))".
template <class Number>
struct Expression {
  std::variant<std::string, Number>
      value; // the expression's text, or the number
  /// Of an expression: its value for the sample at the export, if the file says
  /// so. Nothing that is run depends on it.
  std::optional<Number> at_export = std::nullopt;
};

struct TensorMeta {
  DType dtype = DType::Float32;
  std::vector<Expression<int64_t>> sizes;
  std::vector<Expression<int64_t>> strides;
  Expression<int64_t> storage_offset;
  bool requires_grad = false;
  Device device;
  Layout layout = Layout::Strided;
};

struct Graph {
  std::vector<Argument> inputs;
  std::vector<Argument> outputs;
  std::vector<Node> nodes;
  std::map<std::string, TensorMeta> tensors;
  std::map<std::string, Expression<int64_t>> ints; // symbolic ones, by name
  std::map<std::string, Expression<double>> floats;
  std::map<std::string, Expression<bool>> bools;
  bool returns_single_tensor = false;
};

struct UserInput {
  Argument argument; // a name, or a constant that the caller must pass again
};
struct ParameterInput {
  std::string name; // in the graph
  std::string path; // in the model: "layers.0.weight"
};
struct BufferInput {
  std::string name;
  std::string path;
  bool persistent = true;
};
struct ConstantInput { // a tensor that is part of the program
  std::string name;
  std::string path; // in the archive's constants
};
struct WrittenInput { // a Python value that was fixed at export
  std::string name;
  std::variant<None, int64_t, double, std::string, bool> value;
};
struct ObjectInput {
  CustomObject object;
  std::string path;
};
struct TokenInput {
  std::string name;
};
using InputSpec = std::variant<
    UserInput,
    ParameterInput,
    BufferInput,
    ConstantInput,
    WrittenInput,
    ObjectInput,
    TokenInput>;

struct OutputSpec {
  enum class Kind : uint8_t {
    User,
    Loss,
    BufferMutation,
    ParameterMutation,
    GradientToParameter,
    GradientToUserInput,
    UserInputMutation,
    Token,
  };
  Kind kind = Kind::User;
  Argument argument;
  std::string path; // of the buffer, parameter or user input
};

/// How a Python value is taken apart into a list of leaves and put together:
/// torch.utils._pytree's TreeSpec.
struct TreeSpec {
  enum class Kind : uint8_t {
    Leaf,
    None,
    Tuple,
    List,
    Dict,
    NamedTuple,
    Other
  };
  Kind kind = Kind::Leaf;
  /// For Other, and for Dict and NamedTuple: "collections.OrderedDict",
  /// "transformers.modeling_outputs.CausalLMOutputWithPast".
  std::string type_name;
  /// Of Dict, NamedTuple and Other, where it has some: one for each child. Keys
  /// that are ints are in decimal.
  std::vector<std::string> keys;
  std::vector<TreeSpec> children;

  int64_t num_leaves() const;
};

struct ModuleCall {
  std::string path;
  // Only those calls that were asked to be preserved, and the root, have these.
  std::optional<TreeSpec> inputs; // a tuple of (args, kwargs)
  std::optional<TreeSpec> outputs;
  std::vector<std::string> input_names; // of forward's arguments; may be empty
};

struct Range {
  std::optional<int64_t> min;
  std::optional<int64_t> max;
};

struct Program {
  Graph graph;
  std::vector<InputSpec> inputs; // one for each of graph.inputs
  std::vector<OutputSpec> outputs; // one for each of graph.outputs
  std::vector<ModuleCall> module_calls; // the root first
  std::map<std::string, Range> ranges; // by symbol
  std::vector<std::string>
      guards; // Python expressions over "L['x'].size()[0]" and the like
  std::string torch_version;
  int64_t schema_major = 0;
  int64_t schema_minor = 0;
};

/// Where the bytes of a tensor lie in the archive.
///
/// The bytes are a whole storage, and `meta` says with strides and offset which
/// of its elements are the tensor's: several tensors may be views of one
/// storage. Those that are tied have the same offset and the same sizes,
/// strides and storage offset.
struct Payload {
  uint64_t offset = 0; // in the archive file
  uint64_t size = 0;
  /// CRC-32 of these bytes, as the archive says; 0 if whoever wrote the archive
  /// computed none.
  uint32_t checksum = 0;
  TensorMeta meta; // all numbers are written, the layout is strided
  bool is_parameter = false; // or a buffer, or a constant
  /// Whether the tensor has elements and the archive has none of them: the
  /// model was exported with fake tensors, and its weights come from elsewhere.
  /// `offset` says nothing then, and all such tensors may share one, unless
  /// Archive::names_missing.
  bool is_missing = false;
};

/// A whole archive. `programs` has at least one; "model" is the one that
/// torch.export.load() takes. tessera_export.py writes "model" in training mode
/// and "eval" in evaluation mode.
struct Archive {
  std::map<std::string, Program> programs;
  /// By path in the model, for all programs: parameters and persistent buffers.
  /// Paths of tied tensors have the same Payload::offset.
  std::map<std::string, Payload> weights;
  /// Whether that is so of missing tensors too: tessera_export.py gives each of
  /// them a payload of no bytes, torch.export.save one to all.
  bool names_missing = false;
  /// By program, then by path: buffers that are not persistent, and constants.
  std::map<std::string, std::map<std::string, Payload>> constants;
};

} // namespace tessera::exported
