#include "launch/line_mux.h"

namespace tessera::launch {

void LineSplitter::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t room = kMaxLineBytes - partial_.size();
    const size_t newline = bytes.find('\n');
    const size_t length =
        newline == std::string_view::npos ? bytes.size() : newline;
    if (length > room ||
        (length == room && newline == std::string_view::npos)) {
      partial_.append(bytes.substr(0, room));
      bytes.remove_prefix(room);
      finish();
    } else if (newline == std::string_view::npos) {
      partial_.append(bytes);
      return;
    } else {
      if (partial_.empty()) {
        on_line_(bytes.substr(0, length));
      } else {
        partial_.append(bytes.substr(0, length));
        on_line_(partial_);
        partial_.clear();
      }
      bytes.remove_prefix(length + 1);
    }
  }
}

void LineSplitter::finish() {
  if (!partial_.empty()) {
    on_line_(partial_);
    partial_.clear();
  }
}

void LineTail::push(std::string_view line) {
  if (lines_.size() == kMaxLines) {
    lines_.pop_front();
  }
  std::string& kept =
      lines_.emplace_back(std::string(line.substr(0, kMaxLineBytes)));
  if (line.size() > kMaxLineBytes) {
    kept += " ...";
  }
}

std::string rank_prefix(int rank, int world_size) {
  const std::string number = std::to_string(rank);
  const size_t width = std::to_string(world_size - 1).size();
  return "[" + std::string(width - number.size(), ' ') + number + "] ";
}

} // namespace tessera::launch
