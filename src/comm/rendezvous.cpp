#include "comm/rendezvous.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <sstream>

#include "comm/call.h"

namespace tessera::comm {
namespace {

constexpr const char* kVerdict = "verdict";
constexpr std::string_view kOk = "ok\n";

std::string member_key(int rank) {
  return "member/" + std::to_string(rank);
}

/// Writes the verdict unless there is one; returns the one that holds.
std::string settle(c10d::Store& store, const std::string& verdict) {
  return store.compareSet(kVerdict, "", verdict);
}

std::string timeout_verdict(
    c10d::Store& store,
    int world_size,
    Milliseconds timeout) {
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!store.check({member_key(rank)})) {
      missing.push_back(rank);
    }
  }
  if (missing.empty()) {
    return "the last rank came, but no verdict was reached in time. Start the run again.";
  }
  return fmt::format(
      "{} of {} never joined within {:.1f} s. Look at that process's own output; if it is only slow to start, raise the timeout (TESSERA_TIMEOUT, in seconds).",
      rank_list(missing),
      world_size,
      std::chrono::duration<double>(timeout).count());
}

/// "ok" with the table, or what is wrong with it.
std::string check_members(c10d::Store& store, int world_size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_size; ++rank) {
    keys.push_back(member_key(rank));
  }
  std::string table(kOk);
  const auto records = store.multiGet(keys);
  const Member first =
      Member::decode(std::string(records[0].begin(), records[0].end()));
  for (int rank = 0; rank < world_size; ++rank) {
    const auto& bytes = records[static_cast<size_t>(rank)];
    const std::string record(bytes.begin(), bytes.end());
    const Member member = Member::decode(record);
    if (member.torch_version != first.torch_version) {
      return fmt::format(
          "rank 0 runs LibTorch {}.{}, rank {} runs {}.{}. Use one version everywhere.",
          first.torch_version / 100,
          first.torch_version % 100,
          rank,
          member.torch_version / 100,
          member.torch_version % 100);
    }
    table += record + "\n";
  }
  return table;
}

} // namespace

std::string Member::encode() const {
  return fmt::format(
      "{} {} {} {}", host, world_size, cuda_devices, torch_version);
}

Member Member::decode(const std::string& text) {
  Member member;
  std::istringstream in(text);
  in >> member.host >> member.world_size >> member.cuda_devices >>
      member.torch_version;
  TESSERA_INTERNAL_ASSERT(!in.fail(), "not a member record: " + text);
  return member;
}

std::vector<Member> join(
    c10d::Store& store,
    int rank,
    const Member& self,
    Milliseconds timeout) {
  const int world_size = self.world_size;
  const std::string size_text = std::to_string(world_size);
  const std::string agreed = store.compareSet("world_size", "", size_text);
  if (agreed != size_text) {
    settle(
        store,
        fmt::format(
            "rank {} was started with a world size of {}, another rank with {}. All processes of a run need the same WORLD_SIZE.",
            rank,
            world_size,
            agreed));
  } else if (store.add("claims/" + std::to_string(rank), 1) > 1) {
    settle(
        store,
        fmt::format(
            "two processes claim to be rank {}. Give each its own RANK, 0 to {}; a process of an earlier run may also still be using this store.",
            rank,
            world_size - 1));
  } else {
    store.set(member_key(rank), self.encode());
    if (store.add("count", 1) == world_size) {
      settle(store, check_members(store, world_size));
    }
  }

  std::string verdict;
  bool timed_out = false;
  try {
    store.wait({kVerdict}, timeout);
    verdict = store.get_to_str(kVerdict);
  } catch (const c10::DistError&) {
    timed_out = true;
    verdict = settle(store, timeout_verdict(store, world_size, timeout));
  }

  const ErrorSite site{
      .call = "init", .rank = rank, .world_size = world_size};
  if (verdict.rfind(kOk, 0) != 0) {
    if (timed_out) {
      raise<TimeoutError>(site, verdict);
    }
    raise<c10::DistError>(site, verdict);
  }
  std::vector<Member> members;
  std::istringstream lines(verdict.substr(kOk.size()));
  for (std::string line; std::getline(lines, line);) {
    members.push_back(Member::decode(line));
  }
  return members;
}

void refuse(c10d::Store& store, const std::string& reason) {
  settle(store, reason);
}

} // namespace tessera::comm
