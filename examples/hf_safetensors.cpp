// Loads a Llama in the layout of Hugging Face into a model that is sharded from
// the start, fine-tunes it, and writes it in the same layout.
//
//   tessera run -n 2 hf_safetensors FOLDER
//   hf_safetensors FOLDER                    # alone
//
// FOLDER/pretrained has config.json, model.safetensors.index.json and the files
// it lists; the program makes a small one there if it is missing, so that
// nothing has to be downloaded. The program writes FOLDER/finetuned. For
// another Llama, put the numbers of its config.json into Config (llama.h).
//
// No rank holds the whole model: it is built without memory, cut over the
// ranks, and each rank reads its own bytes from the files. Only the checks, on
// rank 0, load the whole model.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "llama.h"

namespace {

using llama::Config;
using llama::Llama;
using torch::Tensor;
namespace fs = std::filesystem;

// ---- Names -----------------------------------------------------------------

/// Our name to Hugging Face's: "layers.0.mlp.up_proj.weight" is below "model."
/// there.
std::string hugging_face_name(const std::string& name) {
  return name == "head.weight" ? "lm_head.weight" : "model." + name;
}

/// The model's state with Hugging Face's names. Shares the model's memory.
tessera::StateDict hugging_face_state(Llama& model) {
  tessera::StateDict renamed;
  for (const auto& [name, value] : tessera::get_model_state_dict(model)) {
    renamed.set(hugging_face_name(name.name()), value);
  }
  return renamed;
}

// ---- Folders ---------------------------------------------------------------

/// What Hugging Face's libraries need to know about a model besides its
/// weights.
void write_config(const Config& c, const fs::path& folder) {
  std::ofstream(folder / "config.json")
      << "{\n  \"architectures\": [\"LlamaForCausalLM\"],\n"
      << "  \"model_type\": \"llama\",\n  \"hidden_act\": \"silu\",\n"
      << "  \"tie_word_embeddings\": false,\n"
      << "  \"vocab_size\": " << c.vocab_size << ",\n"
      << "  \"hidden_size\": " << c.hidden_size << ",\n"
      << "  \"intermediate_size\": " << c.intermediate_size << ",\n"
      << "  \"num_hidden_layers\": " << c.num_hidden_layers << ",\n"
      << "  \"num_attention_heads\": " << c.num_attention_heads << ",\n"
      << "  \"num_key_value_heads\": " << c.num_key_value_heads << ",\n"
      << "  \"rms_norm_eps\": " << c.rms_norm_eps << ",\n"
      << "  \"rope_theta\": " << c.rope_theta << "\n}\n";
}

/// One process: turns a checkpoint into a folder of safetensors with an index.
/// The `tessera` command, which does it, lies beside this program.
void convert(
    const fs::path& from,
    const fs::path& to,
    const std::string& options) {
  const fs::path tessera =
      fs::read_symlink("/proc/self/exe").parent_path() / "tessera";
  const std::string command = "'" + tessera.string() + "' ckpt convert '" +
      from.string() + "' '" + to.string() + "' --to safetensors " + options;
  if (std::system(command.c_str()) != 0) {
    throw std::runtime_error("this failed: " + command);
  }
  fs::remove_all(from);
}

/// One process: makes an untrained model, in bfloat16 as most are.
void make_pretrained(
    const Config& config,
    const tessera::Group& self,
    const fs::path& folder) {
  Llama model(config);
  const fs::path checkpoint = folder.string() + ".dcp";
  tessera::checkpoint::save(
      hugging_face_state(model),
      checkpoint,
      tessera::checkpoint::SaveOptions().group(self).overwrite(true));
  convert(checkpoint, folder, "--dtype bfloat16 --max-shard-size 500KB");
  write_config(config, folder);
}

/// Fills a model, sharded or whole, from a folder. Collective over `group`.
tessera::checkpoint::LoadReport load(
    Llama& model,
    const fs::path& folder,
    const tessera::Group& group) {
  auto state = tessera::get_model_state_dict(model);
  return tessera::checkpoint::load(
      state,
      folder,
      tessera::checkpoint::LoadOptions()
          .group(group)
          .cast(true) // the files have bfloat16, we train in float32
          .rename(hugging_face_name));
}

// ---- Sharding, checking, training ------------------------------------------

/// A model that is never whole in memory: its parameters get memory when they
/// are sharded.
Llama make_sharded(const Config& config, const torch::Device& device) {
  Llama model{nullptr};
  {
    tessera::DeferredInit deferred;
    model = Llama(config);
    model->to(device);
  }
  for (const auto& layer : *model->layers) {
    tessera::fully_shard(layer);
  }
  tessera::fully_shard(model); // the rest: embedding, norm and head
  return model;
}

/// Sequences to learn: each token is the previous one plus a stride.
Tensor make_ids(const Config& config, const torch::Device& device) {
  const auto start = torch::arange(8).view({8, 1}) * 11;
  const auto stride = torch::arange(1, 9).view({8, 1});
  const auto ids = start + stride * torch::arange(32);
  return ids.remainder(config.vocab_size).to(device);
}

Tensor loss_of(Llama& model, const Tensor& ids) {
  const auto logits = model->forward(ids.narrow(1, 0, ids.size(1) - 1));
  const auto next = ids.narrow(1, 1, ids.size(1) - 1);
  return torch::cross_entropy_loss(logits.flatten(0, 1), next.flatten());
}

/// Whether the sharded model computes the same as the one in `folder`, which
/// rank 0 loads as a whole. Every rank calls this function, because every use
/// of the model gathers it.
bool says_the_same(
    Llama& sharded,
    const Config& config,
    const fs::path& folder,
    const tessera::Group& world,
    const Tensor& ids) {
  const torch::NoGradGuard no_grad;
  const auto logits = sharded->forward(ids);
  if (world.rank() != 0) {
    return true;
  }
  Llama whole(config);
  whole->to(ids.device());
  load(whole, folder, world.alone());
  const double difference =
      (whole->forward(ids) - logits).abs().max().item<double>();
  const bool is_same = difference < 1e-4;
  std::printf(
      "%s: logits of the sharded model and of %s differ by %.1e\n",
      is_same ? "ok" : "WRONG",
      folder.filename().c_str(),
      difference);
  std::fflush(stdout);
  return is_same;
}

/// Returns whether the loss fell to less than half.
bool fine_tune(Llama& model, const tessera::Group& world, const Tensor& ids) {
  if (world.size() > ids.size(0)) {
    throw std::invalid_argument(
        "there are " + std::to_string(ids.size(0)) +
        " rows to learn from: run on at most that many ranks.");
  }
  tessera::optim::AdamW optimizer(tessera::parameters(model), 3e-3);
  // Each rank learns from its own rows.
  const auto own = torch::tensor_split(ids, world.size(), 0)[world.rank()];
  double first = 0;
  double last = 0;
  for (int step = 0; step < 20; ++step) {
    const auto loss = loss_of(model, own);
    loss.backward();
    tessera::clip_grad_norm_(model, 1.0);
    optimizer.step();
    optimizer.zero_grad();
    const auto mean = loss.detach().clone();
    world.all_reduce(mean, tessera::ReduceOp::Avg, "loss");
    last = mean.item<double>();
    first = step == 0 ? last : first;
  }
  const bool has_learned = last < first / 2;
  if (world.rank() == 0) {
    std::printf(
        "%s: 20 steps took the loss from %.2f to %.2f\n",
        has_learned ? "ok" : "WRONG",
        first,
        last);
  }
  return has_learned;
}

void print_memory(
    Llama& model,
    const tessera::checkpoint::LoadReport& report,
    const tessera::Group& world) {
  int64_t own = 0;
  for (const auto& shard : tessera::parameters(model)) {
    own += static_cast<int64_t>(shard.nbytes());
  }
  auto all = torch::tensor({own});
  world.all_reduce(all);
  if (world.rank() == 0) {
    std::printf(
        "each of %d rank(s) has about %.2f MB of %.2f MB of parameters, and read %.2f MB\n",
        world.size(),
        static_cast<double>(own) / 1e6,
        all.item<double>() / 1e6,
        static_cast<double>(report.bytes_read) / 1e6);
  }
}

int run(const tessera::Group& world, const fs::path& folder) {
  torch::Device device = torch::kCPU;
  if (torch::cuda::is_available()) {
    const auto index = tessera::local_rank() % torch::cuda::device_count();
    device = torch::Device(torch::kCUDA, static_cast<int8_t>(index));
  }
  torch::manual_seed(0);
  const Config config;
  const fs::path pretrained = folder / "pretrained";
  const fs::path finetuned = folder / "finetuned";
  if (world.rank() == 0) {
    fs::create_directories(folder);
    fs::remove_all(finetuned);
    if (!fs::exists(pretrained)) {
      make_pretrained(config, world.alone(), pretrained);
    }
  }
  world.barrier();

  Llama model = make_sharded(config, device);
  const auto report = load(model, pretrained, world);
  print_memory(model, report, world);
  const auto ids = make_ids(config, device);
  bool is_right = says_the_same(model, config, pretrained, world, ids);

  is_right &= fine_tune(model, world, ids);
  const fs::path checkpoint = finetuned.string() + ".dcp";
  tessera::checkpoint::save( // all ranks save, each its own part
      hugging_face_state(model),
      checkpoint,
      tessera::checkpoint::SaveOptions().overwrite(true));
  if (world.rank() == 0) {
    convert(checkpoint, finetuned, "--max-shard-size 1MB");
    write_config(config, finetuned);
  }
  world.barrier();
  is_right &= says_the_same(model, config, finetuned, world, ids);
  return is_right ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: hf_safetensors FOLDER\n");
    return 2;
  }
  const auto world = tessera::init();
  try {
    return run(world, argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hf_safetensors: %s\n", error.what());
    return 1;
  }
}
