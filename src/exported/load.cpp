#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/exported/exported.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>
#include <utility>

#include "checkpoint/disk/input.h"
#include "exported/format/archive_reader.h"
#include "exported/loaded_model.h"
#include "exported/overloaded.h"

namespace tessera {
namespace exported {
namespace {

constexpr const char* kLoadCall = "load_exported";

std::shared_ptr<ModelFile> read_file(const std::filesystem::path& path) {
  auto file = std::make_shared<ModelFile>();
  file->path = checkpoint::resolve(path);
  const checkpoint::Input input = checkpoint::open_input(file->path);
  const auto bytes =
      checkpoint::part_of(input.file, file->path, 0, input.bytes);
  file->archive = checkpoint::parsing(
      checkpoint::quoted(file->path), [&] { return read_archive(bytes); });
  return file;
}

/// The programs for training and for evaluation, by name.
std::vector<std::string> program_names(
    const Archive& archive,
    const std::filesystem::path& path) {
  if (archive.programs.contains("model")) {
    return archive.programs.contains("eval")
        ? std::vector<std::string>{"model", "eval"}
        : std::vector<std::string>{"model"};
  }
  std::vector<std::string> names;
  for (const auto& entry : archive.programs) {
    names.push_back(entry.first);
  }
  if (names.size() > 1) {
    raise<c10::NotImplementedError>(
        {.call = kLoadCall, .path = path.native()},
        fmt::format(
            "the archive has the programs \"{}\" and none is called \"model\", so it is not clear which to run. Call the one for training \"model\" and the one for evaluation \"eval\".",
            fmt::join(names, "\", \"")));
  }
  return names;
}

/// Lists the weights of all programs and numbers them.
class WeightList {
 public:
  explicit WeightList(ModelFile& file) : file_(file) {}

  void add_registered(const Program& program, const std::string& name) {
    // Parameters come first, as a model without them has another placement.
    for (const bool parameters : {true, false}) {
      for (const InputSpec& input : program.inputs) {
        if (const auto* parameter = std::get_if<ParameterInput>(&input)) {
          if (parameters) {
            add(WeightSpec::Kind::Parameter,
                parameter->path,
                true,
                &file_.archive.weights.at(parameter->path));
          }
        } else if (const auto* buffer = std::get_if<BufferInput>(&input)) {
          if (!parameters) {
            const auto& from = buffer->persistent
                ? file_.archive.weights
                : file_.archive.constants.at(name);
            add(WeightSpec::Kind::Buffer,
                buffer->path,
                buffer->persistent,
                &from.at(buffer->path));
          }
        }
      }
    }
  }

  /// Constants of two programs may have one name.
  void add_constants(const Program& program, const std::string& name) {
    for (const InputSpec& input : program.inputs) {
      if (const auto* constant = std::get_if<ConstantInput>(&input)) {
        constants_[{name, constant->path}] = file_.weights.size();
        file_.weights.push_back(
            {WeightSpec::Kind::Constant,
             constant->path,
             true,
             &file_.archive.constants.at(name).at(constant->path)});
        ++file_.num_constants;
      }
    }
  }

  WeightNumbers numbers(const Program& program, const std::string& name) const {
    WeightNumbers result;
    for (const InputSpec& input : program.inputs) {
      std::visit(
          Overloaded{
              [&](const ParameterInput& parameter) {
                result[parameter.name] = number(parameter.path);
              },
              [&](const BufferInput& buffer) {
                result[buffer.name] = number(buffer.path);
              },
              [&](const ConstantInput& constant) {
                result[constant.name] =
                    static_cast<uint32_t>(constants_.at({name, constant.path}));
              },
              [](const auto&) {}},
          input);
    }
    return result;
  }

 private:
  void add(
      WeightSpec::Kind kind,
      const std::string& path,
      bool is_persistent,
      const Payload* payload) {
    if (registered_.try_emplace(path, file_.weights.size()).second) {
      file_.weights.push_back({kind, path, is_persistent, payload});
    }
  }
  uint32_t number(const std::string& path) const {
    return static_cast<uint32_t>(registered_.at(path));
  }

  ModelFile& file_;
  std::map<std::string, size_t> registered_;
  std::map<std::pair<std::string, std::string>, size_t> constants_;
};

/// Throws c10::NotImplementedError, with the operators that are missing
/// besides, if the inputs of a program cannot be checked.
Model::Programs make_programs(
    const ModelFile& file,
    const std::vector<std::string>& names,
    const WeightList& weights) {
  Model::Programs programs;
  Refusals refusals;
  for (const std::string& name : names) {
    const Program& program = file.archive.programs.at(name);
    try {
      programs.push_back(std::make_shared<ModelProgram>(
          program, weights.numbers(program, name)));
    } catch (const RefusedSignature& refused) {
      refusals.others.insert(refused.what());
    }
  }
  if (!refusals.others.empty()) {
    for (const std::string& name : names) {
      const Program& program = file.archive.programs.at(name);
      compile(program, weights.numbers(program, name), Placement(), refusals);
    }
  }
  refuse_all(refusals, file.path.native());
  return programs;
}

std::unique_ptr<Model> load(
    const std::filesystem::path& path,
    const ExportedOptions& options) {
  const auto file = read_file(path);
  const auto names = program_names(file->archive, file->path);
  WeightList list(*file);
  for (const std::string& name : names) {
    list.add_registered(file->archive.programs.at(name), name);
  }
  for (const std::string& name : names) {
    list.add_constants(file->archive.programs.at(name), name);
  }
  file->shared = shared_memory(file->weights, file->archive.names_missing);
  auto programs = make_programs(*file, names, list);
  auto model = std::make_unique<Model>(
      file,
      std::move(programs),
      read_weights(
          file->path, file->weights, file->archive.names_missing, options));
  model->prepare();
  return model;
}

} // namespace
} // namespace exported

Exported load_exported(
    const std::filesystem::path& path,
    const ExportedOptions& options) {
  std::unique_ptr<exported::Model> model;
  std::exception_ptr failed;
  std::string why;
  try {
    model = exported::load(path, options);
  } catch (const c10::Error& error) {
    failed = std::current_exception();
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failed = std::current_exception();
    why = error.what();
  }
  if (is_initialized() && world().size() > 1) {
    fail_together(
        world(),
        exported::kLoadCall,
        failed ? std::optional(why) : std::nullopt);
  }
  if (failed) {
    try {
      std::rethrow_exception(failed);
    } catch (const c10::Error&) {
      throw;
    } catch (const checkpoint::FileError& error) { // names the file
      raise({.call = exported::kLoadCall}, error.what());
    } catch (const std::exception& error) {
      raise(
          {.call = exported::kLoadCall, .path = path.native()},
          fmt::format("the program does not fit together ({}).", error.what()));
    }
  }
  return Exported(std::make_shared<ExportedImpl>(std::move(model)));
}

} // namespace tessera
