#include "checkpoint/format/pickle_calls.h"

#include <algorithm>
#include <string>
#include <utility>

#include "checkpoint/format/format_error.h"

namespace tessera::format {
namespace {

// The arguments of a call by position, checked for the expected kinds.
class Args {
 public:
  Args(Call& call, std::string_view name) : call_(call), name_(name) {}

  void expect_count(size_t least, size_t most) const {
    const size_t count = call_.args.size();
    if (count < least || count > most) {
      refuse("has " + std::to_string(count) + " arguments");
    }
  }

  size_t count() const {
    return call_.args.size();
  }

  /// Moves the argument out: each is used once.
  template <class T>
  T take(size_t i) const {
    auto* value = std::get_if<T>(&call_.args[i].is);
    if (!value) {
      refuse_kind(i);
    }
    return std::move(*value);
  }

  std::vector<int64_t> take_ints(size_t i) const {
    if (auto* size = std::get_if<Size>(&call_.args[i].is)) {
      return std::move(size->dims);
    }
    std::vector<int64_t> ints;
    for (const auto& item : take<Tuple>(i).items) {
      const auto* value = item.get<int64_t>();
      if (!value) {
        refuse("has a tuple with " + std::string(item.kind()) + " in it");
      }
      ints.push_back(*value);
    }
    return ints;
  }

  /// Hooks of a tensor: torch writes an empty dictionary or None.
  void expect_nothing(size_t i) const {
    const auto* dict = call_.args[i].get<Dict>();
    if (!call_.args[i].get<None>() && !(dict && dict->items.empty())) {
      refuse("carries hooks, which cannot be kept");
    }
  }

  [[noreturn]] void refuse_kind(size_t i) const {
    refuse(
        "has " + std::string(call_.args[i].kind()) + " as argument " +
        std::to_string(i));
  }
  [[noreturn]] void refuse(const std::string& what) const {
    throw FormatError(call_.at, std::string(name_) + " " + what);
  }

 private:
  Call& call_;
  std::string_view name_;
};

std::string latin1_bytes(const Args& args) {
  std::string bytes;
  const auto text = args.take<std::string>(0);
  // UTF-8 has been checked, so a first byte of c2 or c3 is followed by another.
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    if (byte < 0x80) {
      bytes += text[i];
    } else if (byte == 0xc2 || byte == 0xc3) {
      const auto low = static_cast<uint8_t>(text[++i]);
      bytes += static_cast<char>((byte & 3) << 6 | (low & 0x3f));
    } else {
      args.refuse("has a character that is not a byte");
    }
  }
  return bytes;
}

Value encoded(const Args& args) {
  args.expect_count(2, 2);
  const auto encoding = args.take<std::string>(1);
  if (encoding != "latin1" && encoding != "latin-1") {
    args.refuse("asks for the encoding " + in_quotes(encoding));
  }
  return Bytes{latin1_bytes(args)};
}

Value bytes_object(const Args& args) {
  args.expect_count(0, 1);
  return args.count() == 0 ? Bytes{} : args.take<Bytes>(0);
}

Value set_object(const Args& args) {
  args.expect_count(0, 1);
  return args.count() == 0 ? Set{} : Set{args.take<List>(0).items};
}

Value device(const Args& args) {
  args.expect_count(1, 2);
  auto name = args.take<std::string>(0);
  if (args.count() == 2) {
    name += ":" + std::to_string(args.take<int64_t>(1));
  }
  return Device{std::move(name)};
}

Value path(const Args& args) {
  std::string joined;
  for (size_t i = 0; i < args.count(); ++i) {
    const bool slash = !joined.empty() && joined.back() != '/';
    joined += (slash ? "/" : "") + args.take<std::string>(i);
  }
  return Path{std::move(joined)};
}

Value memory_format(const Args& args) {
  args.expect_count(1, 1);
  const auto number = args.take<int64_t>(0);
  if (number < 0 || number > static_cast<int64_t>(MemoryFormat::Preserve)) {
    args.refuse("has no value " + std::to_string(number));
  }
  return static_cast<MemoryFormat>(number);
}

Value size(const Args& args) {
  args.expect_count(1, 1);
  return Size{args.take_ints(0)};
}

Value layout(const Args& args) {
  args.expect_count(1, 1);
  return Layout{args.take<std::string>(0)};
}

Value complex_number(const Args& args) {
  args.expect_count(2, 2);
  return Complex{args.take<double>(0), args.take<double>(1)};
}

// {"conj": True, "neg": True}
void set_flags(const Args& args, size_t i, Tensor* tensor) {
  for (const auto& [key, value] : args.take<Dict>(i).items) {
    const auto* name = key.get<std::string>();
    const auto* flag = value.get<bool>();
    if (!name || !flag || (*name != "conj" && *name != "neg")) {
      args.refuse("has flags that are not supported");
    }
    (*name == "conj" ? tensor->conj : tensor->neg) = *flag;
  }
}

Tensor tensor_view(const Args& args) {
  Tensor tensor;
  tensor.storage = std::move(*args.take<Box<Storage>>(0));
  tensor.offset = args.take<int64_t>(1);
  tensor.sizes = args.take_ints(2);
  tensor.strides = args.take_ints(3);
  if (args.count() > 4) {
    tensor.requires_grad = args.take<bool>(4);
    args.expect_nothing(5);
  }
  return tensor;
}

Value tensor_v2(const Args& args, size_t least, size_t most) {
  args.expect_count(least, most);
  auto tensor = tensor_view(args);
  if (!tensor.storage.dtype) {
    args.refuse("has a storage without a dtype");
  }
  tensor.dtype = *tensor.storage.dtype;
  if (args.count() == 7) {
    set_flags(args, 6, &tensor);
  }
  return tensor;
}

Value tensor_v3(const Args& args) {
  args.expect_count(7, 8);
  auto tensor = tensor_view(args);
  tensor.dtype = args.take<DType>(6);
  if (args.count() == 8) {
    set_flags(args, 7, &tensor);
  }
  return tensor;
}

Value parameter(const Args& args) {
  args.expect_count(3, 3);
  auto tensor = args.take<Box<Tensor>>(0);
  tensor->requires_grad = args.take<bool>(1);
  tensor->is_parameter = true;
  args.expect_nothing(2);
  return tensor;
}

Value object(Call& call, const Args& args) {
  args.expect_count(0, 0);
  return Object{
      .cls = call.callee.cls,
      .state = call.state ? std::move(*call.state) : Value(Dict{})};
}

} // namespace

MemoryFormat memory_format_named(std::string_view name, uint64_t at) {
  constexpr std::string_view kNames[] = {
      "TORCH_CONTIGUOUS_FORMAT",
      "TORCH_CHANNELS_LAST",
      "TORCH_PRESERVE_FORMAT"};
  const auto* found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) {
    throw FormatError(at, "no memory format is named " + in_quotes(name));
  }
  return static_cast<MemoryFormat>(found - kNames);
}

Value result_of(Call call) {
  switch (call.callee.global) {
    case Global::Object:
      return object(call, Args(call, name_of(call.callee.cls).name));
    case Global::MemoryFormat:
      return memory_format(Args(call, "_MEM_FORMAT_ENCODING"));
    case Global::Size:
      return size(Args(call, "torch.Size"));
    case Global::Device:
      return device(Args(call, "torch.device"));
    case Global::GetLayout:
      return layout(Args(call, "_get_layout"));
    case Global::RebuildTensor:
      return tensor_v2(Args(call, "_rebuild_tensor"), 4, 4);
    case Global::RebuildTensorV2:
      return tensor_v2(Args(call, "_rebuild_tensor_v2"), 6, 7);
    case Global::RebuildTensorV3:
      return tensor_v3(Args(call, "_rebuild_tensor_v3"));
    case Global::RebuildParameter:
      return parameter(Args(call, "_rebuild_parameter"));
    case Global::Counter: {
      const Args args(call, "Counter");
      args.expect_count(1, 1);
      return args.take<Dict>(0);
    }
    case Global::Encode:
      return encoded(Args(call, "_codecs.encode"));
    case Global::Bytes:
      return bytes_object(Args(call, "bytes"));
    case Global::ByteArray:
      return bytes_object(Args(call, "bytearray"));
    case Global::Complex:
      return complex_number(Args(call, "complex"));
    case Global::Set:
      return set_object(Args(call, "set"));
    case Global::Path:
      return path(Args(call, "Path"));
    // The machine turns these into dicts, or never calls them.
    case Global::OrderedDict:
    case Global::GetAttr:
    case Global::DType:
    case Global::TypedStorage:
    case Global::UntypedStorage:
      break;
  }
  throw FormatError(call.at, "a call of something that cannot be called");
}

} // namespace tessera::format
