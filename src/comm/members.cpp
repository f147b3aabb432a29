#include "comm/members.h"

#include <tessera/error.h>

#include <algorithm>
#include <map>

#include "comm/backends/backends.h"
#include "comm/host.h"

namespace tessera::comm {
namespace {

/// NCCL needs a device for each rank of a host.
bool each_rank_has_a_device(const std::vector<Member>& members) {
  std::map<std::string, int> ranks_on;
  for (const auto& member : members) {
    ++ranks_on[member.host];
  }
  return std::all_of(members.begin(), members.end(), [&](const auto& member) {
    return member.cuda_devices >= ranks_on[member.host];
  });
}

} // namespace

bool decide_on_nccl(
    BackendChoice backend,
    const Environment& environment,
    const std::vector<Member>& members) {
  const bool possible = nccl_is_built() && each_rank_has_a_device(members);
  if (backend == BackendChoice::Nccl && !possible) {
    raise<c10::ValueError>(
        {.call = "init",
         .rank = environment.rank,
         .world_size = environment.world_size},
        nccl_is_built()
            ? "the backend \"nccl\" was asked for, but there are fewer CUDA devices than ranks on some host, and NCCL refuses to share one. Start fewer ranks, or use \"auto\"."
            : "the backend \"nccl\" was asked for, but this Tessera was built without it. Build against a LibTorch with CUDA where nccl.h can be found.");
  }
  return possible &&
      (backend == BackendChoice::Auto || backend == BackendChoice::Nccl);
}

std::vector<int> number_hosts(const std::vector<Member>& members) {
  std::map<std::string, int> numbers;
  std::vector<int> host_of;
  for (const auto& member : members) {
    const int next = static_cast<int>(numbers.size());
    host_of.push_back(numbers.try_emplace(member.host, next).first->second);
  }
  return host_of;
}

void warn_if_apart(BackendChoice backend, const std::vector<Member>& members) {
  if (backend != BackendChoice::Auto && backend != BackendChoice::Nccl) {
    return;
  }
  for (size_t rank = 1; rank < members.size(); ++rank) {
    const std::string what =
        what_separates(members[0].host, members[rank].host);
    if (!what.empty()) {
      TORCH_WARN(
          "[init] ranks 0 and ",
          rank,
          " are on one host but in different ",
          what,
          ", so they do not share memory and use Gloo, which is slower. TESSERA_BACKEND=gloo chooses Gloo without this warning.");
      return;
    }
  }
}

} // namespace tessera::comm
