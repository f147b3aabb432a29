#include <ATen/ops/from_blob.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/backends/backends.h"
#include "comm/backends/c10d_carrier.h"
#include "comm/backends/gloo_process_group.h"
#include "comm/backends/messenger.h"
#include "comm/shm/channel.h"

namespace tessera::comm {
namespace {

class GlooWire : public shm::Wire {
 public:
  GlooWire(
      c10::intrusive_ptr<GlooProcessGroup> backend,
      const BackendConfig& config)
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
    throw given_up(name);
  }

  static shm::ChannelError given_up(const std::string& name) {
    return {
        shm::ChannelError::Kind::Aborted,
        "this group was given up while a message to or from " + name +
            " was under way"};
  }

  /// A wait of Gloo that times out closes all connections of the group. So the
  /// waits of other messages end too, and the reason is that of the first.
  shm::ChannelError reason_of(std::string_view what, const std::string& name) {
    using shm::ChannelError;
    if (waited_in_vain(what)) {
      const std::string text = time_is_up() + name +
          " did not come. Alive but elsewhere: look there for the send or recv of this rank and tag, or raise the timeout if that rank is only slow.";
      const MutexLock lock(mutex_);
      if (timed_out_.empty()) {
        timed_out_ = text;
      }
      return {ChannelError::Kind::Timeout, text};
    }
    if (what.find("Application timeout") != std::string_view::npos) {
      const std::string first = first_timeout();
      if (first.empty()) {
        return given_up(name);
      }
      return {
          ChannelError::Kind::Aborted,
          "this group was given up, since another message " + first};
    }
    return {
        ChannelError::Kind::PeerLost,
        "the connection to " + name +
            " broke while this rank waits for it: that rank died or gave this group up. See that rank's own output. (Gloo said: " +
            std::string(what.substr(0, what.find('\n'))) + ")"};
  }

  /// The thread whose wait timed out may still be on its way to say so. Empty
  /// if the group was given up for another reason.
  std::string first_timeout() {
    for (int look = 0; look < 100; ++look) {
      {
        const MutexLock lock(mutex_);
        if (!timed_out_.empty() || backend_->is_aborted()) {
          return timed_out_;
        }
      }
      std::this_thread::sleep_for(Milliseconds(10));
    }
    return {};
  }

  std::string time_is_up() const {
    return fmt::format(
        "timed out after {:.1f} s: ",
        std::chrono::duration<double>(timeout_).count());
  }

  // Constant after construction.
  const c10::intrusive_ptr<GlooProcessGroup> backend_;
  const std::vector<int> names_;
  const Milliseconds timeout_;

  Mutex mutex_;
  std::string timed_out_ TESSERA_GUARDED_BY(mutex_); // the first that did
};

class GlooCarrier : public C10dCarrier {
 public:
  GlooCarrier(
      c10::intrusive_ptr<GlooProcessGroup> gloo,
      const BackendConfig& config)
      : C10dCarrier(
            gloo,
            {.averages = false,
             .c10d_type = c10d::ProcessGroup::BackendType::GLOO}),
        rank_(config.rank),
        gloo_(gloo),
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
  WorkPtr start(const Call& call, const std::function<WorkPtr()>& operation)
      override {
    return gloo_->start(call, operation);
  }

  // Constant after construction.
  const int rank_;
  const c10::intrusive_ptr<GlooProcessGroup> gloo_;
  GlooWire wire_;

  Messenger messenger_; // uses the wire
};

} // namespace

CarrierPtr make_gloo_backend(const BackendConfig& config) {
  auto options = c10d::ProcessGroupGloo::Options::create(config.timeout);
  options->devices = {
      c10d::ProcessGroupGloo::createDeviceForHostname(config.address)};
  auto backend = c10::make_intrusive<GlooProcessGroup>(
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
