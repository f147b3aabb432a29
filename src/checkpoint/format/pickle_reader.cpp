#include "checkpoint/format/pickle_reader.h"

#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_graph.h"
#include "checkpoint/format/pickle_input.h"
#include "checkpoint/format/pickle_opcodes.h"
#include "checkpoint/format/utf8.h"

namespace tessera::format {
namespace {

using Kind = Node::Kind;

// See [Note: a graph, then a tree].
class Machine {
 public:
  explicit Machine(ByteSpan bytes) : in_(bytes) {}

  Value run() {
    while (step()) {
    }
    if (marks_.size() != 0 || stack_.size() != 1) {
      refuse("leaves more or less than one value");
    }
    in_.expect_end();
    return to_value(nodes_, stack_[0], in_.size());
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    in_.refuse(what);
  }

  // ---- Stack and memo ----

  Node& push(Kind kind) {
    stack_.push_back(static_cast<uint32_t>(nodes_.size()));
    auto& node = nodes_.emplace_back();
    node.kind = kind;
    node.at = static_cast<uint32_t>(in_.at());
    return node;
  }

  size_t floor() const {
    return marks_.empty() ? 0 : marks_.back();
  }

  uint32_t pop() {
    if (stack_.size() <= floor()) {
      refuse("finds the stack empty");
    }
    const uint32_t top = stack_.back();
    stack_.pop_back();
    return top;
  }

  uint32_t top() {
    const uint32_t id = pop();
    stack_.push_back(id);
    return id;
  }

  std::vector<uint32_t> pop_last(size_t count) {
    if (stack_.size() - floor() < count) {
      refuse("finds the stack empty");
    }
    std::vector<uint32_t> ids(stack_.end() - count, stack_.end());
    stack_.resize(stack_.size() - count);
    return ids;
  }

  std::vector<uint32_t> pop_to_mark() {
    if (marks_.empty()) {
      refuse("finds no mark");
    }
    auto ids = pop_last(stack_.size() - marks_.back());
    marks_.pop_back();
    return ids;
  }

  Node& top_of(Kind kind, const char* what) {
    auto& node = nodes_[top()];
    if (node.kind != kind) {
      refuse(std::string("is not on ") + what);
    }
    return node;
  }

  void put(uint32_t slot) {
    // Pickles number their slots from 0; a gap would waste memory.
    if (slot > memo_.size()) {
      refuse("leaves a gap in the memo before " + std::to_string(slot));
    }
    const uint32_t id = top();
    if (slot == memo_.size()) {
      memo_.push_back(id);
    } else {
      memo_[slot] = id;
    }
  }

  void get(uint32_t slot) {
    if (slot >= memo_.size()) {
      refuse("wants " + std::to_string(slot) + " of the memo, which is empty");
    }
    stack_.push_back(memo_[slot]);
  }

  // ---- Values ----

  void push_int(int64_t value) {
    push(Kind::Int).integer = value;
  }

  void push_long(ByteSpan digits) {
    if (digits.size() > sizeof(int64_t)) {
      refuse("has an integer of more than 64 bits");
    }
    uint64_t value = 0;
    for (size_t i = 0; i < digits.size(); ++i) {
      value |= static_cast<uint64_t>(digits[i]) << (8 * i);
    }
    if (!digits.empty() && digits.size() < 8 && digits.back() >= 0x80) {
      value |= UINT64_MAX << (8 * digits.size());
    }
    push_int(static_cast<int64_t>(value));
  }

  void push_float() {
    const auto bits = __builtin_bswap64(in_.number<uint64_t>());
    push(Kind::Float).number = std::bit_cast<double>(bits);
  }

  void push_text(uint64_t length) {
    const auto text = as_text(in_.take(length));
    if (!is_utf8(text)) {
      refuse("has a string that is not UTF-8");
    }
    push(Kind::Text).text = text;
  }

  void push_bytes(uint64_t length) {
    const auto bytes = as_text(in_.take(length));
    push(Kind::Bytes).text = bytes;
  }

  void push_tuple(std::vector<uint32_t> ids) {
    push(Kind::Tuple).children = std::move(ids);
  }

  void append(const std::vector<uint32_t>& ids, Kind kind, const char* what) {
    auto& children = top_of(kind, what).children;
    children.insert(children.end(), ids.begin(), ids.end());
  }

  void set_items(const std::vector<uint32_t>& ids) {
    if (ids.size() % 2 != 0) {
      refuse("has a key without a value");
    }
    append(ids, Kind::Dict, "a dict");
  }

  // ---- Globals and calls ----

  void push_global(std::string_view module, std::string_view name) {
    const auto found = find_global(module, name);
    if (!found) {
      throw UnsupportedFormat(
          in_.at(),
          in_.opcode() + " names " +
              in_quotes(std::string(module) + "." + std::string(name)) +
              ", which is not among what a checkpoint may contain");
    }
    push(Kind::Global).global = *found;
  }

  void stack_global() {
    const Node& name = nodes_[pop()];
    const Node& module = nodes_[pop()];
    if (name.kind != Kind::Text || module.kind != Kind::Text) {
      refuse("wants two strings");
    }
    push_global(module.text, name.text);
  }

  void call(bool is_new_object) {
    const uint32_t args_id = pop();
    const Node& args = nodes_[args_id];
    const Node& callee = nodes_[pop()];
    if (callee.kind != Kind::Global || args.kind != Kind::Tuple) {
      refuse("wants a global and a tuple");
    }
    const GlobalRef global = callee.global;
    if (is_new_object != (global.global == Global::Object)) {
      refuse("is not how torch writes this global");
    }
    if (global.global == Global::OrderedDict) {
      if (!args.children.empty()) {
        refuse("gives an OrderedDict arguments");
      }
      push(Kind::Dict);
      return;
    }
    auto& node = push(Kind::Call);
    node.global = global;
    node.children = {args_id}; // shared, not copied: the memo may repeat it
  }

  void build() {
    const uint32_t state = pop();
    auto& node = nodes_[top()];
    if (node.kind == Kind::Dict && nodes_[state].kind == Kind::Dict) {
      return; // attributes of an OrderedDict, which are not kept
    }
    if (node.kind != Kind::Call || node.global.global != Global::Object ||
        node.state != kNoNode) {
      refuse("is not on a new object");
    }
    node.state = state;
  }

  void persistent() {
    const uint32_t id = pop();
    push(Kind::Persistent).children = {id};
  }

  // ---- One opcode; false after the last ----

  bool step() {
    const uint8_t code = in_.next_opcode();
    switch (static_cast<Opcode>(code)) {
      case Opcode::Stop:
        return false;
      case Opcode::Frame:
        if (in_.number<uint64_t>() > in_.num_left()) {
          refuse("is longer than the file");
        }
        return true;
      case Opcode::Mark:
        marks_.push_back(stack_.size());
        return true;
      case Opcode::None:
        push(Kind::None);
        return true;
      case Opcode::NewTrue:
        push(Kind::Bool).integer = 1;
        return true;
      case Opcode::NewFalse:
        push(Kind::Bool);
        return true;
      case Opcode::BinInt:
        push_int(in_.number<int32_t>());
        return true;
      case Opcode::BinInt1:
        push_int(in_.number<uint8_t>());
        return true;
      case Opcode::BinInt2:
        push_int(in_.number<uint16_t>());
        return true;
      case Opcode::Long1:
        push_long(in_.take(in_.number<uint8_t>()));
        return true;
      case Opcode::BinFloat:
        push_float();
        return true;
      case Opcode::ShortBinUnicode:
        push_text(in_.number<uint8_t>());
        return true;
      case Opcode::BinUnicode:
        push_text(in_.number<uint32_t>());
        return true;
      case Opcode::BinUnicode8:
        push_text(in_.number<uint64_t>());
        return true;
      case Opcode::ShortBinBytes:
        push_bytes(in_.number<uint8_t>());
        return true;
      case Opcode::BinBytes:
        push_bytes(in_.number<uint32_t>());
        return true;
      case Opcode::BinBytes8:
      case Opcode::ByteArray8:
        push_bytes(in_.number<uint64_t>());
        return true;
      case Opcode::EmptyList:
        push(Kind::List);
        return true;
      case Opcode::Append:
        append({pop()}, Kind::List, "a list");
        return true;
      case Opcode::Appends:
        append(pop_to_mark(), Kind::List, "a list");
        return true;
      case Opcode::EmptyTuple:
        push(Kind::Tuple);
        return true;
      case Opcode::Tuple:
        push_tuple(pop_to_mark());
        return true;
      case Opcode::Tuple1:
        push_tuple(pop_last(1));
        return true;
      case Opcode::Tuple2:
        push_tuple(pop_last(2));
        return true;
      case Opcode::Tuple3:
        push_tuple(pop_last(3));
        return true;
      case Opcode::EmptyDict:
        push(Kind::Dict);
        return true;
      case Opcode::SetItem:
        set_items(pop_last(2));
        return true;
      case Opcode::SetItems:
        set_items(pop_to_mark());
        return true;
      case Opcode::EmptySet:
        push(Kind::Set);
        return true;
      case Opcode::AddItems:
        append(pop_to_mark(), Kind::Set, "a set");
        return true;
      case Opcode::FrozenSet: {
        auto ids = pop_to_mark();
        push(Kind::Set).children = std::move(ids);
        return true;
      }
      case Opcode::BinPut:
        put(in_.number<uint8_t>());
        return true;
      case Opcode::LongBinPut:
        put(in_.number<uint32_t>());
        return true;
      case Opcode::Memoize:
        put(static_cast<uint32_t>(memo_.size()));
        return true;
      case Opcode::BinGet:
        get(in_.number<uint8_t>());
        return true;
      case Opcode::LongBinGet:
        get(in_.number<uint32_t>());
        return true;
      case Opcode::Global: {
        const auto module = in_.line();
        push_global(module, in_.line());
        return true;
      }
      case Opcode::StackGlobal:
        stack_global();
        return true;
      case Opcode::Reduce:
        call(false);
        return true;
      case Opcode::NewObj:
        call(true);
        return true;
      case Opcode::Build:
        build();
        return true;
      case Opcode::BinPersId:
        persistent();
        return true;
      case Opcode::Proto:
        break; // appears at the beginning only
    }
    throw FormatError(
        in_.at(), "opcode " + opcode_name(code) + " is not accepted");
  }

  PickleInput in_;
  std::vector<Node> nodes_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_; // heights of the stack
  std::vector<uint32_t> memo_;
};

} // namespace

Value read_pickle(ByteSpan bytes) {
  return Machine(bytes).run();
}

} // namespace tessera::format
