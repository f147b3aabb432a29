#include "comm/store_of_world.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <utility>

namespace tessera::comm {
namespace {

/// Hosts the store, or finds the store that an earlier init() hosts there.
OpenedStore host(
    std::vector<HostedStore>& kept,
    const StoreEndpoint& asked_for,
    const std::string& job_id,
    Milliseconds timeout) {
  for (const HostedStore& hosted : kept) {
    if (hosted.asked_for.to_string() == asked_for.to_string()) {
      StorePtr store =
          hosted.store->clone(); // the first connection may be lost
      store->setTimeout(timeout);
      return {std::move(store), hosted.endpoint};
    }
  }
  HostedStore hosted{asked_for, asked_for, nullptr, nullptr};
  hosted.store = host_store(hosted.endpoint, timeout);
  if (!job_id.empty()) {
    hosted.handout =
        std::make_unique<PortHandout>(job_id, hosted.endpoint.port);
  }
  OpenedStore opened{hosted.store, hosted.endpoint};
  kept.push_back(std::move(hosted));
  return opened;
}

} // namespace

OpenedStore open_store(
    std::vector<HostedStore>& kept,
    const Environment& environment,
    Milliseconds timeout) {
  const ErrorSite site{
      .call = "init",
      .rank = environment.rank,
      .world_size = environment.world_size};
  const bool hosts = environment.rank == 0 && !environment.store_is_hosted;
  if (environment.master_addr && environment.master_port) {
    const StoreEndpoint endpoint{
        *environment.master_addr, *environment.master_port};
    return hosts ? host(kept, endpoint, /*job_id=*/"", timeout)
                 : OpenedStore{connect_store(endpoint, timeout), endpoint};
  }
  if (environment.master_addr || environment.master_port) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "{} is set but {} is not. Set both.",
            environment.master_addr ? "MASTER_ADDR" : "MASTER_PORT",
            environment.master_addr ? "MASTER_PORT" : "MASTER_ADDR"));
  }
  const std::string job_id =
      environment.job_id.empty() && environment.launcher == "PMI"
      ? pmi_launcher_identity()
      : environment.job_id;
  if (job_id.empty() || !environment.one_host) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "started by {}, which does not say where rank 0 can be reached{}. Set MASTER_ADDR and MASTER_PORT, the same on all processes, or start with `tessera run`.",
            environment.launcher,
            environment.one_host ? "" : " from other hosts"));
  }
  StoreEndpoint endpoint{"127.0.0.1", 0};
  if (hosts) {
    return host(kept, endpoint, job_id, timeout);
  }
  endpoint.port = PortHandout::ask(job_id, timeout);
  return {connect_store(endpoint, timeout), endpoint};
}

} // namespace tessera::comm
