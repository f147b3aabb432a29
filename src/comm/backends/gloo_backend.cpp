#include <ATen/ops/from_blob.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <gloo/context.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/backends/backends.h"
#include "comm/backends/c10d_carrier.h"
#include "comm/backends/messenger.h"
#include "comm/shm/channel.h"

namespace tessera::comm {
namespace {

/// Tessera's messages use the upper half of c10d's tags; programs that use the
/// process group itself have the lower half.
constexpr int kFirstOwnTag = 1 << 30;

class GlooBackend : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  /// Closes the connections, so that peers that wait in the same operation
  /// fail at once instead of at their timeout, and ends the waits of this
  /// rank's own messages, which Gloo does not tell of closed connections.
  void abort() override {
    const MutexLock lock(mutex_);
    is_aborted_ = true;
    for (const auto& context : contexts_) {
      context->closeConnections();
    }
    for (c10d::Work* message : messages_) {
      message->abort();
    }
  }

  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    require_program_tag(tag);
    const MutexLock lock(mutex_);
    return ProcessGroupGloo::send(tensors, to, tag);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    require_program_tag(tag);
    const MutexLock lock(mutex_);
    return ProcessGroupGloo::recv(tensors, from, tag);
  }

  /// Messages with any tag, from any thread. They return when the message has
  /// been sent or received, or false if abort() was called.
  bool send_message(std::vector<at::Tensor>& tensors, int to, int tag) {
    return wait_for({[&] { return ProcessGroupGloo::send(tensors, to, tag); }});
  }
  bool receive_message(std::vector<at::Tensor>& tensors, int from, int tag) {
    return wait_for(
        {[&] { return ProcessGroupGloo::recv(tensors, from, tag); }});
  }
  /// Also waits for what the receiver answers with `answer_tag`.
  bool send_answered(
      std::vector<at::Tensor>& tensors,
      std::vector<at::Tensor>& answer,
      int to,
      int tag,
      int answer_tag) {
    return wait_for(
        {[&] { return ProcessGroupGloo::recv(answer, to, answer_tag); },
         [&] { return ProcessGroupGloo::send(tensors, to, tag); }});
  }

 private:
  static void require_program_tag(int tag) {
    TORCH_CHECK_VALUE(
        tag < kFirstOwnTag,
        "the tag of a message is ",
        tag,
        "; over Gloo, tags are smaller than 2^30: larger ones are Tessera's own.");
  }

  /// Starts all, then waits for them in this order.
  bool wait_for(std::initializer_list<std::function<WorkPtr()>> starts) {
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

  Mutex mutex_; // held while c10d counts a message
  std::set<c10d::Work*> messages_ TESSERA_GUARDED_BY(mutex_); // under way
  bool is_aborted_ TESSERA_GUARDED_BY(mutex_) = false;
};

class GlooWire : public shm::Wire {
 public:
  GlooWire(c10::intrusive_ptr<GlooBackend> backend, const BackendConfig& config)
      : backend_(std::move(backend)),
        names_(config.global_ranks),
        timeout_(config.timeout) {}

  void send(int to, uint32_t stream, const std::byte* data, size_t bytes)
      override {
    // c10d takes no constant memory, and does not write to it.
    auto tensors = as_tensors(const_cast<std::byte*>(data), bytes);
    if (is_answered(bytes)) {
      std::byte answer{};
      auto answers = as_tensors(&answer, 1);
      wait_for(to, [&] {
        return backend_->send_answered(
            tensors, answers, to, tag_of(stream), answer_tag_of(stream));
      });
      return;
    }
    wait_for(to, [&] {
      return backend_->send_message(tensors, to, tag_of(stream));
    });
  }
  void receive(int from, uint32_t stream, std::byte* data, size_t bytes)
      override {
    auto tensors = as_tensors(data, bytes);
    wait_for(from, [&] {
      return backend_->receive_message(tensors, from, tag_of(stream));
    });
    if (is_answered(bytes)) {
      std::byte answer{};
      auto answers = as_tensors(&answer, 1);
      wait_for(from, [&] {
        return backend_->send_message(answers, from, answer_tag_of(stream));
      });
    }
  }

 private:
  /// [Note: answers over Gloo]
  ///
  /// When a connection breaks, Gloo ends the waits for what is received over
  /// it, and for what could not be sent yet; but it forgets those for bytes
  /// that are on their way to the kernel, which end at their timeout. So the
  /// receiver of more bytes than a socket takes at once answers with one byte,
  /// and the sender waits for that answer.
  static bool is_answered(size_t bytes) {
    return bytes > 4096;
  }
  static_assert(sizeof(Call) <= 4096, "calls are sent without an answer");
  /// The fourth stream of the tag; see [Note: messages].
  static int answer_tag_of(uint32_t stream) {
    return tag_of(stream | 3);
  }

  static int tag_of(uint32_t stream) {
    return static_cast<int>(stream | uint32_t{kFirstOwnTag});
  }

  static std::vector<at::Tensor> as_tensors(std::byte* data, size_t bytes) {
    return {at::from_blob(
        data, {static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte))};
  }

  /// `move` returns false if the group was given up on the way.
  template <class Move>
  void wait_for(int peer, const Move& move) {
    using shm::ChannelError;
    const std::string name = rank_list({&names_[static_cast<size_t>(peer)], 1});
    try {
      if (move()) {
        return;
      }
    } catch (const std::exception& error) {
      throw reason_of(error.what(), name);
    }
    throw ChannelError(
        ChannelError::Kind::Aborted,
        "this group was given up while a message to or from " + name +
            " was under way");
  }

  /// A wait of Gloo that times out closes all connections of the group. So the
  /// waits of other messages end too, and the reason is that of the first.
  shm::ChannelError reason_of(std::string_view what, const std::string& name) {
    using shm::ChannelError;
    if (what.find("imed out waiting") != std::string_view::npos) {
      const std::string text = time_is_up() + name +
          " did not come. Alive but elsewhere: look there for the send or recv of this rank and tag, or raise the timeout if that rank is only slow.";
      const MutexLock lock(mutex_);
      if (timed_out_.empty()) {
        timed_out_ = text;
      }
      return {ChannelError::Kind::Timeout, text};
    }
    if (what.find("Application timeout") != std::string_view::npos) {
      return {
          ChannelError::Kind::Aborted,
          "this group was given up, since another message " + first_timeout()};
    }
    return {
        ChannelError::Kind::PeerLost,
        "the connection to " + name +
            " broke while this rank waits for it: that rank died or gave this group up. See that rank's own output. (Gloo said: " +
            std::string(what.substr(0, what.find('\n'))) + ")"};
  }

  /// The thread whose wait timed out may still be on its way to say so.
  std::string first_timeout() {
    for (int look = 0; look < 100; ++look) {
      {
        const MutexLock lock(mutex_);
        if (!timed_out_.empty()) {
          return timed_out_;
        }
      }
      std::this_thread::sleep_for(Milliseconds(10));
    }
    return "or a collective of this rank timed out";
  }

  std::string time_is_up() const {
    return fmt::format(
        "timed out after {:.1f} s: ",
        std::chrono::duration<double>(timeout_).count());
  }

  // Constant after construction.
  const c10::intrusive_ptr<GlooBackend> backend_;
  const std::vector<int> names_;
  const Milliseconds timeout_;

  Mutex mutex_;
  std::string timed_out_ TESSERA_GUARDED_BY(mutex_); // the first that did
};

class GlooCarrier : public C10dCarrier {
 public:
  GlooCarrier(c10::intrusive_ptr<GlooBackend> gloo, const BackendConfig& config)
      : C10dCarrier(
            gloo,
            {.averages = false,
             .c10d_type = c10d::ProcessGroup::BackendType::GLOO}),
        rank_(config.rank),
        wire_(std::move(gloo), config),
        messenger_(
            wire_,
            config.rank,
            config.global_ranks,
            /*traces_calls=*/false) {}

  ~GlooCarrier() override {
    if (messenger_.is_busy()) {
      backend()->abort(); // its waits end
    }
  }

  WorkPtr reduce(
      const Call& call,
      at::Tensor tensor,
      int root,
      const c10d::ReduceOp& op,
      bool async) override {
    // Gloo leaves sums of some ranks in the tensors of the others.
    return C10dCarrier::reduce(
        call, rank_ == root ? tensor : tensor.clone(), root, op, async);
  }
  WorkPtr send(
      const Call& call,
      const at::Tensor& tensor,
      int to,
      int tag,
      bool async) override {
    return messenger_.send(call, tensor, to, tag, async);
  }
  WorkPtr recv(
      const Call& call,
      const at::Tensor& tensor,
      int from,
      int tag,
      bool async) override {
    return messenger_.receive(call, tensor, from, tag, async);
  }

 private:
  // Constant after construction.
  const int rank_;
  GlooWire wire_;

  Messenger messenger_; // uses the wire
};

} // namespace

CarrierPtr make_gloo_backend(const BackendConfig& config) {
  auto options = c10d::ProcessGroupGloo::Options::create(config.timeout);
  options->devices = {
      c10d::ProcessGroupGloo::createDeviceForHostname(config.address)};
  auto backend = c10::make_intrusive<GlooBackend>(
      config.store, config.rank, config.size(), options);
  // Waits until all ranks are connected: a rank that dropped its group at once
  // would break the connections that a slower rank is still making.
  exchange(
      *config.store,
      "gloo/connected",
      config.rank,
      config.global_ranks,
      "",
      config.timeout,
      config.call);
  return std::make_shared<GlooCarrier>(std::move(backend), config);
}

} // namespace tessera::comm
