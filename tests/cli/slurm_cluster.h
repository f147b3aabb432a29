// A Slurm of our own on this host, from the packages in .launchers.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "launch/process_tree.h"
#include "support/command.h"

namespace tessera::testing {

/// Who submits a job.
enum class Submitter { Self, Nobody };

/// munged, slurmctld, and a slurmd for each of the nodes n0 and n1, as long as
/// the object lives. Nothing outlives the object, neither daemons nor jobs, and
/// nothing outside a folder below /tmp is touched.
class SlurmCluster {
 public:
  SlurmCluster();
  ~SlurmCluster();
  SlurmCluster(const SlurmCluster&) = delete;
  SlurmCluster& operator=(const SlurmCluster&) = delete;

  /// Why there is no cluster; empty if there is one.
  const std::string& problem() const {
    return problem_;
  }
  /// A folder that every user may write to.
  std::filesystem::path work() const {
    return state_ / "work";
  }

  /// Runs srun, sbatch, scontrol and the like in work().
  CommandResult run(
      std::vector<std::string> words,
      Submitter submitter = Submitter::Self) const;
  std::unique_ptr<Command> start(
      std::vector<std::string> words,
      Submitter submitter = Submitter::Self) const;

 private:
  void write_configuration() const;
  void start_daemon(const std::string& name, std::vector<std::string> words);
  bool is_ready() const;
  std::string logs() const;
  CommandOptions options() const;

  std::filesystem::path state_;
  std::string problem_;
  launch::SubreaperScope subreaper_; // steps detach themselves from slurmd
  launch::ProcessTree tree_;
  std::vector<std::unique_ptr<Command>> daemons_;
};

} // namespace tessera::testing
