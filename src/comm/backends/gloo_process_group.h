// c10d's process group over Gloo, as Tessera needs it.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "comm/backends/carrier.h"
#include "comm/diagnostics/call.h"

namespace tessera::comm {

/// Tessera's messages use the upper half of c10d's tags; programs that use the
/// process group itself have the lower half.
inline constexpr int kFirstOwnTag = 1 << 30;

/// Whether this is Gloo's text for a wait that timed out.
bool waited_in_vain(std::string_view message);

class GlooProcessGroup : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  /// Closes the connections, so that peers that wait in the same operation
  /// fail at once instead of at their timeout, and ends the waits of this rank.
  void abort() override;
  bool is_aborted();

  /// [Note: tags of calls]
  ///
  /// c10d numbers collectives, and those of one number meet: two ranks that
  /// make different calls get each other's bytes, or Gloo ends the process
  /// where sizes differ. So the tag of a call holds a digest of it beside its
  /// number. Calls that differ never meet: their ranks wait, and find out
  /// ([Note: long waits]). What a call is for is not in the digest.
  ///
  /// Starts the collectives of `call`, three at most.
  WorkPtr start(const Call& call, const std::function<WorkPtr()>& operation);

  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

  /// Messages with any tag, from any thread. They return when the message has
  /// been sent or received, or false if abort() was called.
  bool send_message(std::vector<at::Tensor>& tensors, int to, int tag);
  bool receive_message(std::vector<at::Tensor>& tensors, int from, int tag);
  /// Also waits for what the receiver answers with `answer_tag`.
  bool send_answered(
      std::vector<at::Tensor>& tensors,
      std::vector<at::Tensor>& answer,
      int to,
      int tag,
      int answer_tag);

 private:
  bool wait_for(std::initializer_list<std::function<WorkPtr()>> starts);
  void end_own_waits();

  Mutex mutex_; // held while c10d counts a message
  std::set<c10d::Work*> messages_ TESSERA_GUARDED_BY(mutex_); // under way
  bool is_aborted_ TESSERA_GUARDED_BY(mutex_) = false;
};

} // namespace tessera::comm
