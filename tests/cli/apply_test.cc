// efla apply: its numbers against the recurrence computed here, in float64, from the definition alone.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/cli/apply_case.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using io::TensorType;

struct Rule {
  std::function<double(double beta, double lambda)> gain = [](double beta, double lambda) {
    return -std::expm1(-beta * lambda) / lambda;
  };
  double erase_scale = 1.0, write_scale = 1.0;
  bool l2norm = false;
  double scale = NAN;
};

// Returns √(Σx² + ε).
double length_of(const std::vector<double>& x) {
  double sum = 1e-6;
  for (const double e : x) sum += e * e;
  return std::sqrt(sum);
}

void divide(std::vector<double>& x, double by) {
  for (double& e : x) e /= by;
}

// S ← S + k (b v − a Sᵀκ)ᵀ, o = scale Sᵀq, per batch entry and head, with κ = k unless there is an erase key.
Tensors recurrence(const Tensors& in, const Rule& rule) {
  const auto& shape = in.at("q").shape;
  const auto B = shape[0], T = shape[1], H = shape[2], K = shape[3], V = in.at("v").shape[3];
  const double scale = std::isnan(rule.scale) ? 1.0 / std::sqrt(double(K)) : rule.scale;
  Tensor o{in.at("v").shape, std::vector<double>(in.at("v").values.size())};
  Tensor s{{B, H, K, V}, std::vector<double>(B * H * K * V, 0.0)};
  if (in.contains("initial_state")) s = in.at("initial_state");
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t h = 0; h < H; ++h) {
      double* state = s.values.data() + (b * H + h) * K * V;
      for (std::int64_t t = 0; t < T; ++t) {
        const std::int64_t token = (b * T + t) * H + h;
        const double* q0 = in.at("q").values.data() + token * K;
        const double* k0 = in.at("k").values.data() + token * K;
        const double* e0 = in.contains("erase_key") ? in.at("erase_key").values.data() + token * K : k0;
        std::vector<double> q(q0, q0 + K), k(k0, k0 + K), erase_key(e0, e0 + K);
        if (rule.l2norm) {
          const double length = length_of(k);
          divide(q, length_of(q));
          divide(k, length);
          divide(erase_key, length);
        }
        double lambda = 0;
        for (std::int64_t i = 0; i < K; ++i) lambda += erase_key[i] * k[i];
        const double gain = rule.gain(in.at("beta").values[token], lambda);
        for (std::int64_t v = 0; v < V; ++v) {
          double read = 0, out = 0;
          for (std::int64_t i = 0; i < K; ++i) read += state[i * V + v] * erase_key[i];
          const double u = rule.write_scale * gain * in.at("v").values[token * V + v] - rule.erase_scale * gain * read;
          for (std::int64_t i = 0; i < K; ++i) {
            state[i * V + v] += k[i] * u;
            out += state[i * V + v] * q[i];
          }
          o.values[token * V + v] = scale * out;
        }
      }
    }
  }
  return {{"o", o}, {"final_state", s}};
}

// ‖got − expected‖ / ‖expected‖, or ‖got‖ where nothing but zeros is expected; NaN where a shape differs.
double relative_error(const Tensor& got, const Tensor& expected) {
  if (got.shape != expected.shape) return NAN;
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    error += std::pow(got.values[i] - expected.values[i], 2);
    norm += std::pow(expected.values[i], 2);
  }
  return std::sqrt(norm > 0 ? error / norm : error);
}

::testing::AssertionResult close(const Tensors& got, const Tensors& expected, double tolerance) {
  for (const auto& [name, tensor] : expected) {
    if (!got.contains(name)) return ::testing::AssertionFailure() << name << " was not written";
    const double error = relative_error(got.at(name), tensor);
    if (!(error <= tolerance)) {
      return ::testing::AssertionFailure() << name << ": relative error " << error << " above " << tolerance;
    }
  }
  return ::testing::AssertionSuccess();
}

class Apply : public ::testing::Test {
 protected:
  // Writes `tensors`, runs apply with `arguments`, reads what it wrote.
  Tensors apply(const Tensors& tensors, TensorType type, std::vector<std::string> arguments) {
    const std::string in = folder_.file("in.safetensors"), out = folder_.file("out.safetensors");
    write_tensors(in, tensors, type);
    arguments.insert(arguments.begin(), {"apply", in, "--out", out});
    result_ = run_program(arguments);
    EXPECT_EQ(result_.exit_code, 0) << result_.err;
    EXPECT_EQ(result_.err, "");
    return result_.exit_code == 0 ? read_tensors(out) : Tensors{};
  }

  TempFolder folder_;
  ProgramResult result_;
};

TEST_F(Apply, ForwardOfEveryImplementation) {
  const auto in = random_problem(2, 37, 3, 5, 7);
  const auto expected = recurrence(in, {});
  for (const char* name : {"auto", "chunk", "recurrent", "ref"}) {
    EXPECT_TRUE(close(apply(in, TensorType::F32, {"--impl", name}), expected, 2e-6)) << name;
  }
  EXPECT_TRUE(close(apply(in, TensorType::F64, {"--impl", "ref"}), expected, 1e-13));
}

TEST_F(Apply, OnAGpuWhereThereIsOne) {
  const auto in = random_problem(2, 137, 3, 40, 24);
  if (run_program({"info"}).out.find("\ngpus        none") != std::string::npos) {
    write_tensors(folder_.file("in"), in, TensorType::F32);
    EXPECT_TRUE(
        is_user_mistake(run_program({"apply", folder_.file("in"), "--out", folder_.file("out"), "--device", "cuda"}),
                        "apply: --device: got cuda, expected cpu, because no GPU can be used here: "));
    return;
  }
  const auto expected = recurrence(in, {});
  EXPECT_TRUE(close(apply(in, TensorType::F32, {"--device", "cuda", "--verbose"}), expected, 2e-6));
  EXPECT_NE(result_.out.find("forward: chunk_cuda\n"), std::string::npos) << result_.out;
  const auto chunks = apply(in, TensorType::BF16, {"--device", "cuda", "--verbose"});
  EXPECT_NE(result_.out.find("forward: chunk_cuda\n"), std::string::npos) << result_.out;
  EXPECT_TRUE(close({{"o", chunks.at("o")}}, {{"o", expected.at("o")}}, 0x1p-6));
}

TEST_F(Apply, ConvertsBetweenTypes) {
  const auto in = random_problem(1, 40, 2, 16, 16);
  const auto expected = recurrence(in, {});
  const auto from_f64 = apply(in, TensorType::F64, {"--dtype", "float32"});
  EXPECT_TRUE(close(from_f64, expected, 2e-6));
  EXPECT_TRUE(close(apply(in, TensorType::BF16, {"--dtype", "float32"}), from_f64, 0.0));
  const auto low = apply(in, TensorType::BF16, {});
  EXPECT_TRUE(close({{"o", low.at("o")}}, {{"o", expected.at("o")}}, 0x1p-8));
  EXPECT_TRUE(close(apply(in, TensorType::F32, {"--dtype", "bfloat16"}), low, 0.0));
}

TEST_F(Apply, TypesOfTheFilesWritten) {
  const auto in = random_problem(1, 4, 1, 4, 4);
  const auto types = [&](TensorType type, std::vector<std::string> arguments) {
    apply(in, type, std::move(arguments));
    const io::SafetensorsFile file(folder_.file("out.safetensors"));
    return std::pair(file.find("o")->type, file.find("final_state")->type);
  };
  EXPECT_EQ(types(TensorType::F32, {}), std::pair(TensorType::F32, TensorType::F32));
  EXPECT_EQ(types(TensorType::BF16, {}), std::pair(TensorType::BF16, TensorType::F32));
  EXPECT_EQ(types(TensorType::F64, {"--impl", "ref"}), std::pair(TensorType::F64, TensorType::F64));
}

TEST_F(Apply, OptionsOfTheRule) {
  auto in = random_problem(1, 20, 2, 8, 8);
  for (auto& x : in.at("k").values) x /= 4;  // euler diverges for ‖k‖² far above 2/β
  Rule euler;
  euler.gain = [](double beta, double) { return beta; };
  EXPECT_TRUE(close(apply(in, TensorType::F32, {"--step", "euler"}), recurrence(in, euler), 2e-6));
  Rule rk2;
  rk2.gain = [](double beta, double lambda) { return beta * (1 - beta * lambda / 2); };
  EXPECT_TRUE(close(apply(in, TensorType::F32, {"--step", "rk2"}), recurrence(in, rk2), 2e-6));
  Rule longhorn;
  longhorn.gain = [](double beta, double lambda) { return beta / (1 + beta * lambda); };
  EXPECT_TRUE(close(apply(in, TensorType::F32, {"--step", "implicit_euler"}), recurrence(in, longhorn), 2e-6));
  Rule scales;
  scales.erase_scale = 2.0;
  scales.write_scale = 0.5;
  scales.scale = -3.0;
  scales.l2norm = true;
  EXPECT_TRUE(
      close(apply(in, TensorType::F32, {"--erase-scale", "2", "--write-scale", "0.5", "--scale", "-3", "--qk-l2norm"}),
            recurrence(in, scales), 2e-6));
}

// Grouped heads, a decay and packed sequences, against the same problem spelled out: q and k repeated, and each
// sequence in a file of its own.
TEST_F(Apply, GroupedHeadsDecaysAndPackedSequences) {
  Random random(5);
  for (const bool channel : {false, true}) {
    Tensors in = random_problem(1, 40, 4, 6, 5);
    in.erase("dfinal_state");
    in["initial_state"] = random_tensor({2, 4, 6, 5}, random);
    in["g"] =
        random_tensor(channel ? std::vector<std::int64_t>{1, 40, 4, 6} : std::vector<std::int64_t>{1, 40, 4}, random);
    for (auto& x : in["g"].values) x = -std::abs(x);
    Tensors grouped = in;
    for (const char* name : {"q", "k"}) {  // two query heads; in `in` each appears twice
      grouped[name] = random_tensor({1, 40, 2, 6}, random);
      for (std::size_t i = 0; i < in[name].values.size(); ++i) {
        const std::size_t channel_of = i % 6, head = i / 6 % 4, token = i / 24;
        in[name].values[i] = grouped[name].values[(token * 2 + head / 2) * 6 + channel_of];
      }
    }
    grouped["cu_seqlens"] = {{3}, {0, 13, 40}};
    const auto packed = apply(grouped, TensorType::F32, {"--grad", "--decay", channel ? "channel" : "scalar"});
    EXPECT_EQ(packed.at("dg").shape, in.at("g").shape);
    EXPECT_EQ(packed.at("dq").shape, grouped.at("q").shape);
    const std::int64_t ends[] = {0, 13, 40};
    for (int n = 0; n < 2; ++n) {
      const auto tokens = [&](const Tensor& from) {
        const auto row = from.values.size() / 40;
        const auto begin = from.values.begin() + ends[n] * row, end = from.values.begin() + ends[n + 1] * row;
        Tensor part{from.shape, {begin, end}};
        part.shape[1] = ends[n + 1] - ends[n];
        return part;
      };
      Tensors alone;
      for (const char* name : {"q", "k", "v", "beta", "g", "dout"}) alone[name] = tokens(in.at(name));
      const auto state = in.at("initial_state").values.size() / 2;
      const auto of_sequence = [&](const Tensor& states) {
        return Tensor{{1, 4, 6, 5}, {states.values.begin() + n * state, states.values.begin() + (n + 1) * state}};
      };
      alone["initial_state"] = of_sequence(in.at("initial_state"));
      const auto one = apply(alone, TensorType::F32, {"--grad", "--impl", "recurrent"});
      for (const char* name : {"o", "dv", "dbeta", "dg"}) {
        EXPECT_TRUE(close({{name, tokens(packed.at(name))}}, {{name, one.at(name)}}, 1e-5)) << name << n;
      }
      EXPECT_TRUE(close({{"s", of_sequence(packed.at("final_state"))}}, {{"s", one.at("final_state")}}, 1e-5));
      Tensor dq = tokens(packed.at("dq")), summed = dq;
      for (std::size_t i = 0; i < dq.values.size(); ++i) {
        const std::size_t channel_of = i % 6, head = i / 6 % 2, token = i / 12;
        const auto at = [&](std::size_t h) { return one.at("dq").values[(token * 4 + 2 * head + h) * 6 + channel_of]; };
        summed.values[i] = at(0) + at(1);
      }
      EXPECT_TRUE(close({{"dq", dq}}, {{"dq", summed}}, 1e-5));
    }
  }
}

TEST_F(Apply, InitialStateIsOptional) {
  auto in = random_problem(1, 9, 1, 4, 6);
  for (const char* name : {"initial_state", "dout", "dfinal_state"}) in.erase(name);
  EXPECT_TRUE(close(apply(in, TensorType::F32, {}), recurrence(in, {}), 2e-6));
}

// The derivative of Σ o·dout + Σ S_T·dfinal_state with respect to one input, by central differences.
double difference_quotient(Tensors in, const std::string& name, std::size_t element) {
  const auto loss = [&] {
    const auto out = recurrence(in, {});
    double sum = 0;
    for (const auto& [of, gradient] : {std::pair{"o", "dout"}, {"final_state", "dfinal_state"}}) {
      if (!in.contains(gradient)) continue;
      const auto &x = out.at(of).values, &dx = in.at(gradient).values;
      for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * dx[i];
    }
    return sum;
  };
  constexpr double kStep = 1e-5;
  const double x = in.at(name).values[element];
  in.at(name).values[element] = x + kStep;
  const double above = loss();
  in.at(name).values[element] = x - kStep;
  return (above - loss()) / (2 * kStep);
}

Tensors differences(const Tensors& in) {
  Tensors all;
  for (const char* name : {"q", "k", "v", "beta", "erase_key", "initial_state"}) {
    if (!in.contains(name)) continue;
    Tensor gradient{in.at(name).shape, {}};
    for (std::size_t i = 0; i < in.at(name).values.size(); ++i) {
      gradient.values.push_back(difference_quotient(in, name, i));
    }
    all[std::string("d") + name] = gradient;
  }
  return all;
}

// κ = b ∘ k with b between 0 and 1, as in Gated DeltaNet-2.
TEST_F(Apply, TwoKeys) {
  Tensors in = random_problem(1, 12, 2, 4, 5);
  Random random(6);
  in["erase_key"] = in.at("k");
  for (double& x : in["erase_key"].values) x *= std::round(random.uniform(0, 1) * 16) / 16;
  Rule normalised;
  normalised.l2norm = true;
  for (const char* row : {"chunk_simd", "recurrent_simd", "ref"}) {
    EXPECT_TRUE(close(apply(in, TensorType::F32, {"--impl", row}), recurrence(in, {}), 2e-6)) << row;
    EXPECT_TRUE(close(apply(in, TensorType::F32, {"--impl", row, "--qk-l2norm"}), recurrence(in, normalised), 2e-6))
        << row;
  }
  EXPECT_TRUE(close(apply(in, TensorType::F32, {"--grad"}), differences(in), 1e-5));
}

TEST_F(Apply, GradientsOfEveryImplementation) {
  const auto in = random_problem(1, 35, 2, 4, 3);
  const auto expected = differences(in);
  EXPECT_TRUE(close(apply(in, TensorType::F64, {"--grad", "--impl", "ref"}), expected, 1e-8));
  for (const char* name : {"auto", "chunk", "recurrent"}) {
    EXPECT_TRUE(close(apply(in, TensorType::F32, {"--grad", "--impl", name}), expected, 1e-5)) << name;
  }
}

TEST_F(Apply, OneOfTheOutputsGradientsIsEnough) {
  for (const char* missing : {"dout", "dfinal_state"}) {
    auto in = random_problem(1, 6, 1, 3, 2);
    in.erase(missing);
    EXPECT_TRUE(close(apply(in, TensorType::F64, {"--grad", "--impl", "ref"}), differences(in), 1e-8)) << missing;
  }
}

TEST_F(Apply, SameBitsWithAnyThreadCount) {
  const auto in = random_problem(2, 70, 2, 16, 32);
  apply(in, TensorType::F32, {"--grad", "--threads", "1"});
  const auto one = read_text(folder_.file("out.safetensors"));
  for (const char* threads : {"3", "0"}) {
    apply(in, TensorType::F32, {"--grad", "--threads", threads});
    EXPECT_EQ(one, read_text(folder_.file("out.safetensors"))) << threads;
  }
}

TEST_F(Apply, SaysWhichOutputsAreNotFinite) {
  auto in = random_problem(1, 9, 1, 4, 6);
  for (const char* name : {"q", "v"}) {
    for (auto& x : in.at(name).values) x = 1e30;
  }
  write_tensors(folder_.file("in.safetensors"), in, TensorType::F32);
  const auto result = run_program({"apply", folder_.file("in.safetensors"), "--out", folder_.file("out.safetensors")});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "efla: apply: inf or NaN in o\n");
}

TEST_F(Apply, VerboseSaysWhatRan) {
  const auto in = random_problem(1, 3, 1, 4, 4);
  apply(in, TensorType::F32, {"--impl", "ref", "--grad", "--verbose"});
  EXPECT_EQ(result_.out, "forward: ref\nbackward: ref\n");
  apply(in, TensorType::F32, {"--verbose"});
  EXPECT_TRUE(result_.out.ends_with("forward: chunk_amx\n") || result_.out.ends_with("forward: recurrent_simd\n"))
      << result_.out;
  apply(in, TensorType::F32, {});
  EXPECT_EQ(result_.out, "");
}

}  // namespace
}  // namespace efla::test
