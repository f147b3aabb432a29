// What exported models refuse, and in which words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "exported/cases.h"

namespace tessera {
namespace {

using ExportedRejectsTest = testing::ExportedCases;

using testing::exported_case;
using ::testing::HasSubstr;
using testing::on_ranks;

template <class F>
std::string error_of(const F& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

std::string load_error(const char* name) {
  return error_of([&] { load_exported(exported_case(name)); });
}

std::string forward_error(const char* name, const ExportedArgs& args) {
  auto model = load_exported(exported_case(name));
  return error_of([&] { model->forward(args); });
}

/// A file with other bytes in place of some, of the same length.
std::filesystem::path with_text(
    const std::string& name,
    const std::string& from,
    const std::string& to) {
  std::ifstream file(exported_case(name), std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  TORCH_CHECK(from.size() == to.size());
  for (size_t at = bytes.find(from); at != bytes.npos;
       at = bytes.find(from, at)) {
    bytes.replace(at, to.size(), to);
  }
  const auto path = std::filesystem::temp_directory_path() /
      ("tessera_exported_" + std::to_string(getpid()) + ".pt2");
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST_F(ExportedRejectsTest, AnInputOfTheWrongRank) {
  EXPECT_EQ(
      forward_error("mlp", {torch::randn({5, 6, 1})}),
      "[forward] the input \"x\" is a float32 tensor of shape [5, 6, 1], but the model was exported with a float32 tensor of shape [5, 6].");
}

TEST_F(ExportedRejectsTest, AShapeOfAnotherSize) {
  EXPECT_EQ(
      forward_error("mlp", {torch::randn({5, 7})}),
      "[forward] the input \"x\" is a float32 tensor of shape [5, 7], but the model was exported with a float32 tensor of shape [5, 6].");
}

TEST_F(ExportedRejectsTest, AShapeOutsideTheExportedRange) {
  const auto ids = [](int64_t batch, int64_t length) {
    return torch::zeros({batch, length}, torch::kLong);
  };
  EXPECT_THAT(
      forward_error("rotary_dynamic", {ids(17, 3)}),
      ::testing::MatchesRegex(
          "\\[forward\\] the input \"ids\" is an int64 tensor of shape \\[17, 3\\], but the model was exported with an int64 tensor of shape \\[s[0-9]+ \\(2 to 16\\), s[0-9]+ \\(2 to 16\\)\\]\\."));
  EXPECT_THAT(
      forward_error("rotary_dynamic", {ids(3, 1)}), HasSubstr("(2 to 16)"));
  EXPECT_EQ(forward_error("rotary_dynamic", {ids(16, 16)}), "no error");
}

TEST_F(ExportedRejectsTest, SizesThatDoNotGoTogether) {
  EXPECT_THAT(
      forward_error(
          "symbolic", {torch::randn({6, 4}), torch::randn({13, 2}), 3}),
      ::testing::MatchesRegex(
          "\\[forward\\] the input \"doubled\" is a float32 tensor of shape \\[13, 2\\], but the model was exported with a float32 tensor of shape \\[2\\*s[0-9]+, 2\\]\\. With the other inputs, 2\\*s[0-9]+ is 12 here\\."));
}

TEST_F(ExportedRejectsTest, AnotherDtype) {
  EXPECT_EQ(
      forward_error("rotary", {torch::zeros({3, 7}, torch::kInt)}),
      "[forward] the input \"ids\" is an int32 tensor of shape [3, 7], but the model was exported with an int64 tensor of shape [3, 7]. Convert it with to(), or export the model for this dtype.");
}

TEST_F(ExportedRejectsTest, AMissingAnUnknownAndADoubleInput) {
  EXPECT_EQ(
      forward_error("mlp", {}),
      "[forward] the input \"x\" is missing: a float32 tensor of shape [5, 6].");
  EXPECT_EQ(
      forward_error("mlp", ExportedArgs().set("y", torch::randn({5, 6}))),
      "[forward] there is no input \"y\"; the model was exported with \"x\".");
  EXPECT_EQ(
      forward_error(
          "mlp",
          ExportedArgs{torch::randn({5, 6})}.set("x", torch::randn({5, 6}))),
      "[forward] the input \"x\" was given twice.");
  EXPECT_EQ(
      forward_error("mlp", {torch::randn({5, 6}), 1}),
      "[forward] 2 positional arguments were given, but the model takes 1 arguments.");
}

TEST_F(ExportedRejectsTest, AnotherFormOfInput) {
  const testing::Reference reference("forms");
  const ExportedValue& x = reference["args"][0];
  const ExportedValue& pair = reference["args"][1];
  const ExportedValue& options = reference["kwargs"]["options"];
  EXPECT_EQ(
      forward_error(
          "forms",
          ExportedArgs{x, ExportedValue::tuple({pair[0]})}.set(
              "options", options)),
      "[forward] the input \"pair\" is a tuple of 1, but the model was exported with a tuple of 2.");
  EXPECT_EQ(
      forward_error(
          "forms",
          ExportedArgs{x, pair}.set(
              "options", ExportedValue::dict({{"bias", 1}}))),
      "[forward] the input \"options['bias']\" is the int 1, but the model was exported with a dict with the keys \"inner\".");
  EXPECT_EQ(
      forward_error(
          "forms",
          ExportedArgs{x, pair}.set("options", options).set("scale", 3.0)),
      "[forward] the input \"scale\" is the float 3, but the model was exported with the float 2.5. This value is part of the program: export the model again for another one.");
}

TEST_F(ExportedRejectsTest, InputsThatBreakAGuard) {
  EXPECT_EQ(
      forward_error("even", {torch::randn({7, 3}), torch::randn({9})}),
      "[forward] the inputs do not fulfil a condition of the exported program: (L['x'].size()[0] % 2) == 0. Export the model for such inputs.");
  EXPECT_EQ(
      forward_error("even", {torch::randn({6, 3}), torch::randn({9})}),
      "no error");
}

TEST_F(ExportedRejectsTest, GuardsOnInputsWithoutNames) {
  for (const char* name : {"guard_args", "guard_strict"}) {
    SCOPED_TRACE(name);
    EXPECT_THAT(
        forward_error(name, {torch::randn({7, 3})}),
        HasSubstr(
            "the inputs do not fulfil a condition of the exported program"));
    EXPECT_EQ(forward_error(name, {torch::randn({6, 3})}), "no error");
  }
}

TEST_F(ExportedRejectsTest, AGuardThatIsNotUnderstood) {
  const auto path = with_text("even", " % 2) == 0", " @ 2) == 0");
  const auto error = error_of([&] { load_exported(path); });
  std::filesystem::remove(path);
  EXPECT_THAT(
      error,
      HasSubstr(
          "the expression \"(L['x'].size()[0] @ 2) == 0\" is not understood: \")\" is expected before \"@\"."));
}

TEST_F(ExportedRejectsTest, AnAssertionOfTheProgram) {
  EXPECT_THAT(
      forward_error("chosen", {torch::randn({5, 3}), torch::tensor(6)}),
      HasSubstr("Runtime assertion failed for expression u0 <="));
}

TEST_F(ExportedRejectsTest, AnOperatorThatFailsWithItsNodeAndItsLine) {
  EXPECT_THAT(
      forward_error("rotary", {torch::full({3, 7}, 99)}),
      ::testing::AllOf(
          HasSubstr("index out of range"),
          HasSubstr(
              "in node \"embedding\" of torch.ops.aten.embedding.default, module \"embed\", File \""),
          HasSubstr("export_cases.py\", line "),
          HasSubstr("x = self.drop(self.embed(ids))")));
}

TEST_F(ExportedRejectsTest, TheOtherModeOfAFileWithOneProgram) {
  auto model = load_exported(exported_case("dropout"));
  model->eval();
  EXPECT_THAT(
      error_of([&] {
        model->forward(torch::randn({5, 6}));
      }),
      HasSubstr(
          "the model is in evaluation mode, but the file has one program only, which was exported in training mode: dropout. Call train(), or write a file for both modes with tessera_export.py."));
  auto plain = load_exported(exported_case("mlp")); // a dropout of nothing
  plain->eval();
  EXPECT_EQ(plain->forward(torch::randn({5, 6})).size(1), 4);
}

TEST_F(ExportedRejectsTest, SeveralResultsAsOneTensor) {
  const testing::Reference reference("loops");
  auto model = load_exported(exported_case("loops"));
  EXPECT_THAT(
      error_of([&] {
        model->forward(
            reference["args"][0].tensor(), reference["args"][1].tensor());
      }),
      HasSubstr("this is a tuple of 4, not a tensor."));
}

TEST_F(ExportedRejectsTest, AConversionToIntegers) {
  auto model = load_exported(exported_case("mlp"));
  EXPECT_THAT(
      error_of([&] { model->to(torch::kLong); }),
      HasSubstr("can be converted to a floating dtype, not to int64."));
}

TEST_F(ExportedRejectsTest, AModuleThatIsNotThere) {
  auto model = load_exported(exported_case("rotary"));
  EXPECT_THAT(
      error_of([&] { model->module_at("layer.0"); }),
      HasSubstr("there is no module \"layer.0\". Did you mean \"layers.0\"?"));
}

TEST_F(ExportedRejectsTest, AllOperatorsThatAreMissing) {
  const auto path = with_text("mlp", "aten.gelu.default", "aten.geluu.defaul");
  const auto second = error_of([&] { load_exported(path); });
  std::filesystem::remove(path);
  EXPECT_THAT(second, HasSubstr("this LibTorch has no operator aten::geluu"));
}

TEST_F(ExportedRejectsTest, OperatorsAreNamedForAllProgramsAndBesideGuards) {
  EXPECT_THAT(
      load_error("refused_missing"),
      HasSubstr("this LibTorch has no operator aten::one, aten::other."));
  EXPECT_THAT(
      load_error("refused_guarded"),
      ::testing::AllOf(
          HasSubstr("this LibTorch has no operator aten::one, aten::other."),
          HasSubstr("the expression \"odd(1)\" is not understood")));
}

TEST_F(ExportedRejectsTest, OperatorsThatAreNoPartOfAModel) {
  const std::string error = load_error("refused_closed");
  for (const char* name :
       {"aten.from_file", "tessera.read_exported", "c10d.barrier"}) {
    EXPECT_THAT(
        error,
        HasSubstr(
            std::string("torch.ops.") + name +
            ".default is an operator that no model may call"));
  }
}

TEST_F(ExportedRejectsTest, AListThatAGraphReturns) {
  for (const char* name : {"refused_list", "refused_nested_list"}) {
    EXPECT_THAT(
        load_error(name),
        HasSubstr("the end of a graph gives a list in place of single values."))
        << name;
  }
}

TEST_F(ExportedRejectsTest, ProgramsOfWhichNoneIsForTraining) {
  EXPECT_THAT(
      load_error("refused_nameless"),
      HasSubstr(
          "the archive has the programs \"eval\", \"train\" and none is called \"model\""));
}

TEST_F(ExportedRejectsTest, ProgramsThatDoNotFitTogether) {
  const auto changed_error =
      [](const char* name, const std::string& from, const std::string& to) {
        const auto path = with_text(name, from, to);
        const auto error = error_of([&] { load_exported(path); });
        std::filesystem::remove(path);
        return error;
      };
  EXPECT_THAT(
      changed_error("cond_left", "higher_order.cond", "higher_order.conf"),
      HasSubstr(
          "torch.ops.higher_order.conf is a higher-order operator, which is not supported"));
  EXPECT_THAT(
      changed_error(
          "loops", "higher_order.while_loop", "higher_order.cond______"),
      HasSubstr("not supported"));
  EXPECT_THAT(
      changed_error("symbolic", "_operator.floordiv", "torch.sym_ite     "),
      HasSubstr("torch.sym_ite"));
}

TEST_F(ExportedRejectsTest, AFileThatIsNotThereOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    const std::string path = world.rank() == 0 ? exported_case("mlp").string()
                                               : "/nowhere/model.pt2";
    EXPECT_THAT(
        error_of([&] { load_exported(path); }),
        ::testing::AllOf(
            HasSubstr("load_exported"), HasSubstr("/nowhere/model.pt2")));
  });
}

TEST_F(ExportedRejectsTest, AFileThatIsCutOffOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    const auto path = std::filesystem::temp_directory_path() /
        ("tessera_cut_" + std::to_string(getpid()) + ".pt2");
    std::filesystem::copy_file(exported_case("mlp"), path);
    if (world.rank() == 1) {
      std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
    }
    EXPECT_THAT(
        error_of([&] { load_exported(path); }), HasSubstr("tessera_cut_"));
    std::filesystem::remove(path);
  });
}

} // namespace
} // namespace tessera
