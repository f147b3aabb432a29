#include "checkpoint/format/pickle_writer.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <variant>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_globals.h"
#include "checkpoint/format/pickle_graph.h"
#include "checkpoint/format/pickle_opcodes.h"
#include "checkpoint/format/utf8.h"

namespace tessera::format {
namespace {

class Writer {
 public:
  std::string run(const Value& value) {
    op(Opcode::Proto);
    out_ += '\x02';
    write(value);
    op(Opcode::Stop);
    return std::move(out_);
  }

  // ---- One for each kind of value ----

  void operator()(const None&) {
    op(Opcode::None);
  }

  void operator()(bool value) {
    op(value ? Opcode::NewTrue : Opcode::NewFalse);
  }

  void operator()(int64_t value) {
    if (value >= 0 && value <= UINT8_MAX) {
      op(Opcode::BinInt1);
      number(static_cast<uint8_t>(value));
    } else if (value >= 0 && value <= UINT16_MAX) {
      op(Opcode::BinInt2);
      number(static_cast<uint16_t>(value));
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
      op(Opcode::BinInt);
      number(static_cast<int32_t>(value));
    } else {
      op(Opcode::Long1);
      number(uint8_t{sizeof(value)});
      number(value);
    }
  }

  void operator()(double value) {
    op(Opcode::BinFloat);
    number(__builtin_bswap64(std::bit_cast<uint64_t>(value)));
  }

  void operator()(const std::string& text) {
    if (recall(text)) {
      return;
    }
    if (!is_utf8(text)) {
      throw FormatError("a string is not UTF-8: " + in_quotes(text));
    }
    if (text.size() > UINT32_MAX) {
      throw FormatError("a string of more than 4 GiB");
    }
    op(Opcode::BinUnicode);
    number(static_cast<uint32_t>(text.size()));
    out_ += text;
    remember(text);
  }

  // Protocol 2 has no bytes: text of the same code points, and its encoding.
  void operator()(const Bytes& bytes) {
    std::string text;
    for (const char c : bytes.data) {
      const auto byte = static_cast<uint8_t>(c);
      if (byte < 0x80) {
        text += c;
      } else {
        text += static_cast<char>(0xc0 | byte >> 6);
        text += static_cast<char>(0x80 | (byte & 0x3f));
      }
    }
    global("_codecs", "encode");
    (*this)(text);
    (*this)(std::string("latin1"));
    op(Opcode::Tuple2);
    op(Opcode::Reduce);
  }

  void operator()(const Complex& value) {
    global("__builtin__", "complex");
    (*this)(value.real);
    (*this)(value.imag);
    op(Opcode::Tuple2);
    op(Opcode::Reduce);
  }

  void operator()(const List& list) {
    op(Opcode::EmptyList);
    fill(list.items, Opcode::Appends);
  }

  void operator()(const Tuple& tuple) {
    if (tuple.items.empty()) {
      op(Opcode::EmptyTuple);
      return;
    }
    op(Opcode::Mark);
    for (const auto& item : tuple.items) {
      write(item);
    }
    op(Opcode::Tuple);
  }

  void operator()(const Set& set) {
    global("__builtin__", "set");
    op(Opcode::EmptyList);
    fill(set.items, Opcode::Appends);
    op(Opcode::Tuple1);
    op(Opcode::Reduce);
  }

  void operator()(const Dict& dict) {
    op(Opcode::EmptyDict);
    if (dict.items.empty()) {
      return;
    }
    op(Opcode::Mark);
    for (const auto& [key, value] : dict.items) {
      write(key);
      write(value);
    }
    op(Opcode::SetItems);
  }

  void operator()(const Size& size) {
    global("torch", "Size");
    ints(size.dims);
    op(Opcode::Tuple1);
    op(Opcode::Reduce);
  }

  void operator()(DType dtype) {
    global("torch", info(dtype).torch_name);
  }

  void operator()(const Device& device) {
    call_with_name("torch", "device", device.name);
  }

  void operator()(const Layout& layout) {
    call_with_name("torch.serialization", "_get_layout", layout.name);
  }

  void operator()(MemoryFormat format) {
    global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING");
    (*this)(static_cast<int64_t>(format));
    op(Opcode::Tuple1);
    op(Opcode::Reduce);
  }

  void operator()(const Path& path) {
    call_with_name("pathlib", "PosixPath", path.name);
  }

  void operator()(const Box<Storage>& storage) {
    op(Opcode::Mark);
    (*this)(std::string("storage"));
    if (storage->dtype) {
      const auto name = info(*storage->dtype).storage_name;
      if (name.empty()) {
        throw FormatError(
            "torch has no typed storage of " +
            std::string(info(*storage->dtype).torch_name));
      }
      global("torch", name);
    } else {
      global("torch.storage", "UntypedStorage");
    }
    (*this)(storage->key);
    (*this)(storage->location);
    (*this)(storage->numel);
    op(Opcode::Tuple);
    op(Opcode::BinPersId);
  }

  void operator()(const Box<Tensor>& tensor) {
    if (tensor->is_parameter) {
      global("torch._utils", "_rebuild_parameter");
      plain_tensor(*tensor);
      (*this)(tensor->requires_grad);
      no_hooks();
      op(Opcode::Tuple3);
      op(Opcode::Reduce);
    } else {
      plain_tensor(*tensor);
    }
  }

  void operator()(const Box<Object>& object) {
    const auto name = name_of(object->cls);
    global(name.module, name.name);
    op(Opcode::EmptyTuple);
    op(Opcode::NewObj);
    const auto* fields = object->state.get<Dict>();
    if (!fields || !fields->items.empty()) {
      write(object->state);
      op(Opcode::Build);
    }
  }

 private:
  void write(const Value& value) {
    // Tensors and objects nest a few more in the graph than in the tree.
    if (++depth_ > kMaxNesting / 2) {
      throw FormatError(
          "values are nested more than " + std::to_string(kMaxNesting / 2) +
          " deep");
    }
    std::visit(*this, value.is);
    --depth_;
  }

  void op(Opcode code) {
    out_ += static_cast<char>(code);
  }

  template <class T>
  void number(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void fill(const std::vector<Value>& items, Opcode add) {
    if (items.empty()) {
      return;
    }
    op(Opcode::Mark);
    for (const auto& item : items) {
      write(item);
    }
    op(add);
  }

  void ints(const std::vector<int64_t>& values) {
    Tuple tuple;
    tuple.items.assign(values.begin(), values.end());
    (*this)(tuple);
  }

  void call_with_name(
      std::string_view module,
      std::string_view function,
      const std::string& argument) {
    global(module, function);
    (*this)(argument);
    op(Opcode::Tuple1);
    op(Opcode::Reduce);
  }

  void no_hooks() {
    global("collections", "OrderedDict");
    op(Opcode::EmptyTuple);
    op(Opcode::Reduce);
  }

  void plain_tensor(const Tensor& tensor) {
    const bool typed = tensor.storage.dtype == tensor.dtype;
    global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    op(Opcode::Mark);
    (*this)(Box<Storage>(tensor.storage));
    (*this)(tensor.offset);
    ints(tensor.sizes);
    ints(tensor.strides);
    (*this)(tensor.requires_grad);
    no_hooks();
    if (!typed) {
      (*this)(tensor.dtype);
    }
    if (tensor.conj || tensor.neg) {
      Dict flags;
      for (const auto& [name, flag] :
           {std::pair("conj", tensor.conj), std::pair("neg", tensor.neg)}) {
        if (flag) {
          flags.add(name, true);
        }
      }
      (*this)(flags);
    }
    op(Opcode::Tuple);
    op(Opcode::Reduce);
  }

  void global(std::string_view module, std::string_view name) {
    std::string line;
    line.append(module).append("\n").append(name).append("\n");
    // The byte distinguishes the global from a string with the same text.
    const std::string key = '\xff' + line;
    if (recall(key)) {
      return;
    }
    op(Opcode::Global);
    out_ += line;
    remember(key);
  }

  // ---- Memo of strings and globals: names come again for every chunk ----

  bool recall(const std::string& key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) {
      return false;
    }
    if (found->second <= UINT8_MAX) {
      op(Opcode::BinGet);
      number(static_cast<uint8_t>(found->second));
    } else {
      op(Opcode::LongBinGet);
      number(found->second);
    }
    return true;
  }

  void remember(const std::string& key) {
    if (key.size() > kLongestShared) {
      return;
    }
    const auto slot = static_cast<uint32_t>(memo_.size());
    memo_.emplace(key, slot);
    if (slot <= UINT8_MAX) {
      op(Opcode::BinPut);
      number(static_cast<uint8_t>(slot));
    } else {
      op(Opcode::LongBinPut);
      number(slot);
    }
  }

  // A longer string would let two bytes stand for more text than read_pickle()
  // allows for them.
  static constexpr size_t kLongestShared = 96;

  std::string out_;
  std::unordered_map<std::string, uint32_t> memo_;
  size_t depth_ = 0;
};

} // namespace

std::string write_pickle(const Value& value) {
  return Writer().run(value);
}

} // namespace tessera::format
