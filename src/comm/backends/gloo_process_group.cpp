#include "comm/backends/gloo_process_group.h"

#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>

#include <gloo/context.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/fnv.h"

namespace tessera::comm {
namespace {

/// Tessera's own, of answers to messages with the largest tag.
constexpr int kNobodysTag = std::numeric_limits<int>::max();

void require_program_tag(int tag) {
  TORCH_CHECK_VALUE(
      tag < kFirstOwnTag,
      "the tag of a message is ",
      tag,
      "; over Gloo, tags are smaller than 2^30: larger ones are Tessera's own.");
}

/// The upper half of all tags: collectives that a program starts itself have
/// the lower half. 15 bits of the digest, and 16 bits for the numbers of 16,384
/// calls that may be under way together, 4 for each.
uint32_t tag_of(const Call& call) {
  const uint64_t digest = mix_digest(
      mix_digest(
          mix_digest(kFnvStart, std::string_view(call.operation)),
          std::string_view(call.detail)),
      call.bytes);
  const uint64_t folded =
      digest ^ (digest >> 15) ^ (digest >> 30) ^ (digest >> 45);
  const uint64_t number = call.sequence * 4;
  return static_cast<uint32_t>(
      (uint64_t{1} << 31) | ((folded & 0x7fff) << 16) | (number & 0xffff));
}

} // namespace

bool waited_in_vain(std::string_view message) {
  return message.find("imed out waiting") != std::string_view::npos;
}

void GlooProcessGroup::abort() {
  {
    const MutexLock lock(mutex_);
    is_aborted_ = true;
    for (c10d::Work* message : messages_) {
      message->abort();
    }
  }
  end_own_waits();
  for (const auto& context : contexts_) {
    context->closeConnections();
  }
}

bool GlooProcessGroup::is_aborted() {
  const MutexLock lock(mutex_);
  return is_aborted_;
}

/// Gloo tells this rank's own operations nothing of connections that the rank
/// closes, and whoever destroys the process group waits for them. But if any
/// wait times out, Gloo ends all of them: so this waits for a message that
/// nobody sends.
void GlooProcessGroup::end_own_waits() {
  std::vector<at::Tensor> tensors{at::empty({1}, at::TensorOptions(at::kByte))};
  for (int peer = 0; peer < getSize(); ++peer) {
    if (peer == getRank()) {
      continue;
    }
    try {
      WorkPtr message;
      {
        const MutexLock lock(mutex_);
        message = ProcessGroupGloo::recv(tensors, peer, kNobodysTag);
      }
      message->wait(Milliseconds(1));
    } catch (const std::exception& error) {
      if (waited_in_vain(error.what())) {
        return;
      }
      // This connection is broken, which has ended the waits for its peer.
    }
  }
}

WorkPtr GlooProcessGroup::start(
    const Call& call,
    const std::function<WorkPtr()>& operation) {
  // A program that uses the process group itself has its own count.
  const uint32_t before = std::exchange(collectiveCounter_, tag_of(call));
  const auto restore =
      c10::make_scope_exit([&] { collectiveCounter_ = before; });
  return operation();
}

WorkPtr GlooProcessGroup::send(
    std::vector<at::Tensor>& tensors,
    int to,
    int tag) {
  require_program_tag(tag);
  const MutexLock lock(mutex_);
  return ProcessGroupGloo::send(tensors, to, tag);
}

WorkPtr GlooProcessGroup::recv(
    std::vector<at::Tensor>& tensors,
    int from,
    int tag) {
  require_program_tag(tag);
  const MutexLock lock(mutex_);
  return ProcessGroupGloo::recv(tensors, from, tag);
}

bool GlooProcessGroup::send_message(
    std::vector<at::Tensor>& tensors,
    int to,
    int tag) {
  return wait_for({[&] { return ProcessGroupGloo::send(tensors, to, tag); }});
}

bool GlooProcessGroup::receive_message(
    std::vector<at::Tensor>& tensors,
    int from,
    int tag) {
  return wait_for({[&] { return ProcessGroupGloo::recv(tensors, from, tag); }});
}

bool GlooProcessGroup::send_answered(
    std::vector<at::Tensor>& tensors,
    std::vector<at::Tensor>& answer,
    int to,
    int tag,
    int answer_tag) {
  return wait_for(
      {[&] { return ProcessGroupGloo::recv(answer, to, answer_tag); },
       [&] { return ProcessGroupGloo::send(tensors, to, tag); }});
}

/// Starts all, then waits for them in this order.
bool GlooProcessGroup::wait_for(
    std::initializer_list<std::function<WorkPtr()>> starts) {
  std::vector<WorkPtr> works;
  const auto forget = c10::make_scope_exit([&] {
    const MutexLock lock(mutex_);
    for (const WorkPtr& work : works) {
      messages_.erase(work.get());
    }
  });
  {
    const MutexLock lock(mutex_);
    if (is_aborted_) {
      return false;
    }
    for (const auto& start : starts) {
      works.push_back(start());
      messages_.insert(works.back().get());
    }
  }
  return std::all_of(works.begin(), works.end(), [](const WorkPtr& work) {
    return work->wait();
  });
}

} // namespace tessera::comm
