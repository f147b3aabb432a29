#include "launch/node_channel.h"

namespace tessera::launch {
namespace {

[[noreturn]] void lose_contact(const std::exception& error) {
  throw ChannelLost(
      std::string("lost contact with the launcher of node 0: ") + error.what());
}

} // namespace

std::string seconds_text(std::chrono::steady_clock::duration duration) {
  return std::to_string(
             std::chrono::ceil<std::chrono::seconds>(duration).count()) +
      " s";
}

std::optional<std::string> NodeChannel::connect() {
  auto problem = channel_->connect();
  last_answer_ = Clock::now();
  return problem;
}

void NodeChannel::set(const std::string& key, const std::string& bytes) {
  try {
    channel_->set(key, bytes);
  } catch (const std::exception& error) {
    lose_contact(error);
  }
}

void NodeChannel::set_unless_set(
    const std::string& key,
    const std::string& bytes) {
  try {
    channel_->set_unless_set(key, bytes);
  } catch (const std::exception& error) {
    lose_contact(error);
  }
}

std::optional<std::string> NodeChannel::get(const std::string& key) {
  try {
    auto value = channel_->get(key);
    last_answer_ = Clock::now();
    return value;
  } catch (const ChannelSlow&) {
    if (Clock::now() - last_answer_ < patience_) {
      return std::nullopt; // as if it were not set yet
    }
    throw ChannelLost(
        "the launcher of node 0 has not answered for " +
        seconds_text(patience_) + ". Is the host up?");
  } catch (const std::exception& error) {
    lose_contact(error);
  }
}

} // namespace tessera::launch
