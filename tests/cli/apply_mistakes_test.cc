// efla apply on bad input: one clear line, exit code 2, and nothing written.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "tests/cli/apply_case.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using io::TensorType;

class ApplyMistakes : public ::testing::Test {
 protected:
  ProgramResult run(std::vector<std::string> arguments = {}) {
    arguments.insert(arguments.begin(), {"apply", in_, "--out", out_});
    return run_program(arguments);
  }

  // Runs apply on these tensors: the message must contain `part`, and the folder hold what it held.
  void expect_refused(const Tensors& tensors, const std::string& part, std::vector<std::string> arguments = {},
                      TensorType type = TensorType::F32, const std::map<std::string, TensorType>& other = {}) {
    write_tensors(in_, tensors, type, other);
    EXPECT_TRUE(is_user_mistake(run(std::move(arguments)), part));
    expect_nothing_written();
  }

  void expect_nothing_written() {
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      EXPECT_EQ(entry.path(), in_) << "was left behind";
    }
  }

  TempFolder folder_;
  std::string in_ = folder_.file("in.safetensors"), out_ = folder_.file("out.safetensors");
  Tensors problem_ = random_problem(1, 6, 2, 4, 3);
};

TEST_F(ApplyMistakes, MissingTensor) {
  for (const char* name : {"q", "k", "v", "beta"}) {
    auto tensors = problem_;
    tensors.erase(name);
    expect_refused(tensors, "apply: " + std::string(name) + ": got nothing, expected a tensor [B, T, H");
  }
}

TEST_F(ApplyMistakes, UnknownTensor) {
  problem_["inital_state"] = problem_["initial_state"];
  expect_refused(
      problem_,
      "got 'inital_state', expected q, k, v, beta, initial_state, dout, dfinal_state, g, cu_seqlens, erase_key "
      "(nearest: initial_state)");
}

TEST_F(ApplyMistakes, WrongRank) {
  for (const auto& [name, shape] : {std::pair{"q", "[B, T, H, K]"}, {"v", "[B, T, HV, V]"}}) {
    auto tensors = problem_;
    tensors[name].shape = {static_cast<std::int64_t>(tensors[name].values.size())};
    expect_refused(tensors, std::string("apply: ") + name + ": got shape [" +
                                std::to_string(tensors[name].values.size()) + "], expected " + shape);
  }
}

TEST_F(ApplyMistakes, SizesThatDoNotAgree) {
  Random random(1);
  const auto expect = [&](const char* name, std::vector<std::int64_t> shape, const std::string& part) {
    auto tensors = problem_;
    tensors[name] = random_tensor(std::move(shape), random);
    expect_refused(tensors, std::string("apply: ") + name + ": got shape " + part);
  };
  expect("k", {1, 6, 2, 5}, "[1, 6, 2, 5], expected [B, T, H, K] = [1, 6, 2, 4]");
  expect("v", {1, 5, 2, 3}, "[1, 5, 2, 3], expected [B, T, HV, V] = [1, 6, 2, 3]");
  expect("beta", {1, 6, 3}, "[1, 6, 3], expected [B, T, HV] = [1, 6, 2]");
  expect("beta", {1, 6, 2, 1}, "[1, 6, 2, 1], expected [B, T, HV] = [1, 6, 2]");
  expect("initial_state", {1, 2, 3, 4}, "[1, 2, 3, 4], expected [N, HV, K, V] = [1, 2, 4, 3]");
  expect("dout", {1, 6, 2, 4}, "[1, 6, 2, 4], expected [B, T, HV, V] = [1, 6, 2, 3]");
  expect("v", {1, 6, 3, 3}, "[1, 6, 3, 3], expected HV a multiple of H = 2");
  expect("g", {1, 6, 3}, "[1, 6, 3], expected [B, T, HV] = [1, 6, 2]");
  expect("g", {1, 6, 2, 3}, "[1, 6, 2, 3], expected [B, T, HV, K] = [1, 6, 2, 4]");
  expect("cu_seqlens", {1, 2}, "[1, 2], expected [N + 1] with N ≥ 1");
  expect("dfinal_state", {2, 2, 4, 3}, "[2, 2, 4, 3], expected [N, HV, K, V] = [1, 2, 4, 3]");
}

TEST_F(ApplyMistakes, PackedSequences) {
  const auto expect = [&](std::vector<double> ends, const std::string& part, std::int64_t batch = 1) {
    auto tensors = random_problem(batch, 6, 2, 4, 3);
    tensors.erase("initial_state");
    tensors.erase("dfinal_state");
    tensors["cu_seqlens"] = {{static_cast<std::int64_t>(ends.size())}, ends};
    expect_refused(tensors, part);
  };
  expect({1, 3, 6}, "cu_seqlens[0]: got 1, expected 0");
  expect({0, 4, 3, 6}, "cu_seqlens[2]: got 3, expected at least cu_seqlens[1] = 4");
  expect({0, 3, 5}, "cu_seqlens[2]: got 5, expected T = 6");
  expect({0, -1, 6}, "cu_seqlens[1]: got -1, expected at least cu_seqlens[0] = 0");
  expect({0, 6}, "batch size B: got 2, expected 1 with cu_seqlens", 2);
  problem_["cu_seqlens"] = {{2}, {0, 6}};
  expect_refused(problem_, "apply: cu_seqlens: got F32, expected I64", {}, TensorType::F32,
                 {{"cu_seqlens", TensorType::F32}});
}

TEST_F(ApplyMistakes, SizesOfZero) {
  expect_refused(random_problem(0, 6, 2, 4, 3), "batch size B: got 0, expected 1 to 2147483647");
  expect_refused(random_problem(1, 0, 2, 4, 3), "token count T: got 0, expected 1 to 2147483647");
  expect_refused(random_problem(1, 6, 0, 4, 3), "head count H: got 0, expected 1 to 2147483647");
  expect_refused(random_problem(1, 6, 2, 0, 3), "key dim K: got 0, expected 1 to 2147483647");
  expect_refused(random_problem(1, 6, 2, 4, 0), "value dim V: got 0, expected 1 to 2147483647");
}

TEST_F(ApplyMistakes, WrongType) {
  expect_refused(problem_, "apply: q: got I64, expected F32, BF16 or F64", {}, TensorType::F32,
                 {{"q", TensorType::I64}});
  expect_refused(problem_, "apply: q: got F16, expected F32, BF16 or F64", {}, TensorType::F32,
                 {{"q", TensorType::F16}});
  expect_refused(problem_, "apply: v: got BF16, expected F32, where q is F32", {}, TensorType::F32,
                 {{"v", TensorType::BF16}});
  expect_refused(problem_, "apply: initial_state: got BF16, expected F32, where q is BF16", {}, TensorType::BF16,
                 {{"initial_state", TensorType::BF16}});
  expect_refused(problem_, "apply: dfinal_state: got F32, expected F64, where q is F64", {}, TensorType::F64,
                 {{"dfinal_state", TensorType::F32}});
}

TEST_F(ApplyMistakes, NumbersThatAreNotFinite) {
  Random random(1);
  problem_["g"] = random_tensor({1, 6, 2, 4}, random);
  for (const auto& [name, tensor] : problem_) {
    for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
      auto tensors = problem_;
      tensors[name].values.back() = bad;
      std::string index;
      for (const auto extent : tensor.shape) index += (index.empty() ? "" : ", ") + std::to_string(extent - 1);
      const std::string number = std::isnan(bad) ? "nan" : bad > 0 ? "inf" : "-inf";
      expect_refused(tensors,
                     "apply: " + name + ": got " + number + " at [" + index + "], expected numbers that are finite");
    }
  }
}

TEST_F(ApplyMistakes, NumbersThatOverflowTheTypeAskedFor) {
  problem_["v"].values[1] = 1e300;
  expect_refused(problem_, "apply: v: got 1e+300 at [0, 0, 0, 1], expected numbers that are finite in float32",
                 {"--dtype", "float32"}, TensorType::F64);
  problem_["v"].values[1] = std::numeric_limits<float>::max();  // rounds up to infinity in bfloat16
  expect_refused(problem_, "expected numbers that are finite in bfloat16", {"--dtype", "bfloat16"});
}

TEST_F(ApplyMistakes, Options) {
  expect_refused(problem_, "apply: --step: got 'exat'", {"--step", "exat"});
  expect_refused(problem_, "(nearest: exact)", {"--step", "exat"});
  expect_refused(problem_, "apply: --step: got 'rk65', expected rk1 to rk64", {"--step", "rk65"});
  expect_refused(problem_, "apply: --impl: got 'chunky', expected auto, ", {"--impl", "chunky"});
  expect_refused(problem_, "(nearest: chunk)", {"--impl", "chunky"});
  expect_refused(problem_, "apply: --impl: got 'chunk_cuda', expected one that takes this problem (chunk_cuda: ",
                 {"--impl", "chunk_cuda"});
  expect_refused(problem_, "apply: --impl: got 'recurrent_simd', expected one of auto, ",
                 {"--impl", "recurrent_simd", "--grad"});
  expect_refused(problem_,
                 "apply: --dtype: got 'float16', expected float32, bfloat16 (nearest: ", {"--dtype", "float16"});
  for (const char* option : {"--erase-scale", "--write-scale", "--scale"}) {
    for (const char* value : {"nan", "inf", "-inf"}) {
      expect_refused(problem_, std::string("apply: ") + option + ": got " + value + ", expected a finite number",
                     {option, value});
    }
    expect_refused(problem_, std::string("apply: ") + option + ": got 'two', expected NUMBER", {option, "two"});
    expect_refused(problem_, option, {option});
  }
  for (const char* value : {"-1", "1025", "99999999999", "1.5"}) {
    expect_refused(problem_, std::string("apply: --threads: got ") + value + ", expected 0 to 1024",
                   {"--threads", value});
  }
  expect_refused(problem_, "apply: --grad: got 'maybe', expected no value", {"--grad=maybe"});
  expect_refused(problem_, "unknown option '--stpe', nearest is --step", {"--stpe", "exact"});
  expect_refused(problem_, "unexpected argument 'more'", {"more"});
  EXPECT_TRUE(is_user_mistake(run_program({"apply", in_}), "--out is required"));
  EXPECT_TRUE(is_user_mistake(run_program({"apply", "--out", out_}), "IN is required"));
}

TEST_F(ApplyMistakes, DoublePrecisionRunsOnTheReferenceOnly) {
  expect_refused(problem_, "apply: --impl: got auto, expected ref for F64", {}, TensorType::F64);
  expect_refused(problem_, "apply: --impl: got chunk, expected ref for F64", {"--impl", "chunk"}, TensorType::F64);
}

TEST_F(ApplyMistakes, GradientsWithoutWhatTheyNeed) {
  problem_.erase("dout");
  problem_.erase("dfinal_state");
  expect_refused(problem_, "apply: --grad: got neither dout nor dfinal_state", {"--grad"});
}

TEST_F(ApplyMistakes, Files) {
  EXPECT_TRUE(is_user_mistake(run(), in_));  // there is none yet
  write_tensors(in_, problem_, TensorType::F32);
  const auto whole = read_text(in_);
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{40}, whole.size() - 1}) {
    std::ofstream(in_, std::ios::binary) << whole.substr(0, size);
    EXPECT_TRUE(is_user_mistake(run(), in_ + ": at byte ")) << size;
    expect_nothing_written();
  }
  EXPECT_TRUE(is_user_mistake(run_program({"apply", folder_.path().string(), "--out", out_}),
                              folder_.path().string() + ": is a folder, expected a file"));
  EXPECT_TRUE(is_user_mistake(run_program({"apply", "/dev/zero", "--out", out_}), "is not a regular file"));
  std::filesystem::remove(in_);
  ASSERT_EQ(mkfifo(in_.c_str(), 0600), 0);
  EXPECT_TRUE(is_user_mistake(run(), in_ + ": is not a regular file"));
}

TEST_F(ApplyMistakes, NamesInAFileDoNotReachTheTerminalAsTheyAre) {
  for (const auto& name : {std::string("\x1b[2J\r\n\u009b31m\u202e"), std::string(1'000'000, 'x')}) {
    write_tensors(in_, {{name, {{1}, {1.0}}}}, TensorType::F32);
    const auto result = run();
    EXPECT_TRUE(is_user_mistake(result, "', expected q, k, v, beta, initial_state"));
    EXPECT_LT(result.err.size(), 5000U);
    for (const char* control : {"\x1b", "\r", "\u009b", "\u202e"}) {
      EXPECT_EQ(result.err.find(control), std::string::npos) << result.err;
    }
  }
}

TEST_F(ApplyMistakes, OutputThatCannotBeWritten) {
  write_tensors(in_, problem_, TensorType::F32);
  EXPECT_TRUE(is_user_mistake(run_program({"apply", in_, "--out", folder_.path().string()}),
                              "apply: --out: got the folder " + folder_.path().string() + ", expected a file name"));
  EXPECT_TRUE(is_user_mistake(run_program({"apply", in_, "--out", folder_.file("none/out.safetensors")}),
                              "apply: --out: got " + folder_.file("none/out.safetensors")));
  for (const std::string device : {"/dev/full", "/dev/null"}) {
    EXPECT_TRUE(is_user_mistake(run_program({"apply", in_, "--out", device}),
                                "apply: --out: got " + device + ", which is not a regular file"));
  }
  EXPECT_TRUE(is_user_mistake(run_program({"apply", in_, "--out", folder_.file(std::string(300, 'x'))}),
                              "expected a file name that the system takes (File name too long)"));
  expect_nothing_written();
}

TEST_F(ApplyMistakes, OutputThatIsTheInput) {
  write_tensors(in_, problem_, TensorType::F32);
  const auto before = read_text(in_);
  const auto link = folder_.file("link"), hard_link = folder_.file("hard_link");
  std::filesystem::create_symlink(in_, link);
  std::filesystem::create_hard_link(in_, hard_link);
  for (const auto& name : {in_, folder_.file("./../" + folder_.path().filename().string() + "/link"), hard_link}) {
    EXPECT_TRUE(is_user_mistake(run_program({"apply", in_, "--out", name}),
                                "apply: --out: got " + name + ", which is the input " + in_ + ", expected another"));
    EXPECT_TRUE(is_user_mistake(run_program({"apply", name, "--out", in_}), "which is the input " + name));
  }
  EXPECT_EQ(read_text(in_), before);
}

TEST_F(ApplyMistakes, LeftoversOfAKilledProcessGoAtTheNextStart) {
  write_tensors(in_, problem_, TensorType::F32);
  const auto ended = start_command({"true"}, "/dev/null", "/dev/null");
  ASSERT_EQ(wait_for(ended), 0);
  const auto count = folder_.files();
  const auto other = folder_.file(".other.tmp-" + std::to_string(ended) + "-0");
  write_text(folder_.file(".out.safetensors.tmp-" + std::to_string(ended) + "-0"), "half");
  write_text(other, "of another output");
  EXPECT_EQ(run_program({"apply", in_, "--out", folder_.file("out.safetensors")}).exit_code, 0);
  EXPECT_EQ(folder_.files(), count + 2);  // the output and the other one
  EXPECT_TRUE(std::filesystem::exists(other));
}

// A limit on the size of files stands for a full disk: either refuses a write that the program has begun.
TEST_F(ApplyMistakes, FullDiskKeepsAnOlderOutput) {
  write_tensors(in_, random_problem(1, 64, 4, 16, 16), TensorType::F32);
  for (const bool older : {false, true}) {
    if (older) std::ofstream(out_) << "older";
    const auto result = run_command(
        {"bash", "-c", "ulimit -f 4; exec " + std::string(EFLA_PROGRAM) + " apply " + in_ + " --out " + out_});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.err, "efla: " + out_ + ": cannot write to it: File too large\n");
    if (older) {
      EXPECT_EQ(read_text(out_), "older");
      std::filesystem::remove(out_);
    }
    expect_nothing_written();
  }
}

TEST_F(ApplyMistakes, FailureKeepsAnOlderOutput) {
  std::ofstream(out_) << "older";
  problem_["q"].values[0] = NAN;
  write_tensors(in_, problem_, TensorType::F32);
  EXPECT_TRUE(is_user_mistake(run(), "got nan at [0, 0, 0, 0]"));
  EXPECT_EQ(read_text(out_), "older");
}

TEST_F(ApplyMistakes, StatesLargerThanTheMachine) {
  // Two small tensors whose state, K × V, is a thousand gigabytes.
  const std::int64_t n = 500'000;
  Tensors tensors;
  tensors["q"] = tensors["k"] = tensors["v"] = {{1, 1, 1, n}, std::vector<double>(n, 0.5)};
  tensors["beta"] = {{1, 1, 1}, {0.5}};
  expect_refused(tensors, "apply: sizes B, T, H, K, V: got tensors and states of 2000 GB, expected at most the ");
}

TEST_F(ApplyMistakes, TensorsLargerThanTheMachine) {
  // A file with holes: a billion tokens that take no room on the disk.
  constexpr std::uint64_t kTokens = 1'000'000'000, kKey = 4 * 64 * 4, kGate = 4 * 4;  // bytes a token
  std::string header;
  std::uint64_t begin = 0;
  for (const char* name : {"q", "k", "v", "beta"}) {
    const bool gate = std::string(name) == "beta";
    const auto end = begin + kTokens * (gate ? kGate : kKey);
    header += std::string(header.empty() ? "{" : ",") + "\"" + name + R"(":{"dtype":"F32","shape":[1,1000000000,4)" +
              (gate ? "" : ",64") + R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
    begin = end;
  }
  header += "}";
  std::ofstream file(in_, std::ios::binary);
  const std::uint64_t size = header.size();
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header;
  file.close();
  std::error_code error;
  std::filesystem::resize_file(in_, sizeof(size) + size + begin, error);
  if (error) GTEST_SKIP() << "no files with holes here: " << error.message();
  EXPECT_TRUE(
      is_user_mistake(run(), "apply: sizes B, T, H, K, V: got tensors and states of 4112 GB, expected at most"));
  expect_nothing_written();
}

TEST_F(ApplyMistakes, ShapeThatOverflows) {
  // A header alone can claim any shape; none of it may be allocated.
  const std::string header =
      R"({"q":{"dtype":"F32","shape":[4294967296,4294967296,4294967296,1],"data_offsets":[0,0]}})";
  std::ofstream file(in_, std::ios::binary);
  const std::uint64_t size = header.size();
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header;
  file.close();
  EXPECT_TRUE(is_user_mistake(run(), in_ + ": at byte "));
  expect_nothing_written();
}

}  // namespace
}  // namespace efla::test
