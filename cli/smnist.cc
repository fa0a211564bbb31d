#include "cli/smnist.h"

#include <fmt/core.h>
#include <malloc.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "efla/autograd/one_thread.h"
#include "efla/base/error.h"
#include "efla/data/digits.h"
#include "efla/ops/delta.h"
#include "efla/train/run.h"

namespace efla::cli {
namespace {
constexpr std::int64_t kImageSide = 28;  // PixelClassifierConfig::tokens is its square
}

data::ImageSet load_images(const std::string& source, data::Split split, std::int64_t count) {
  const bool training = split == data::Split::train;
  const std::string option = training ? "--train-images" : "--test-images";
  if (count < 0) throw Error("data", option, std::to_string(count), "a count, or 0 for all");
  if (source == "builtin") {
    const std::int64_t usual = training ? kBuiltinTrainImages : kBuiltinTestImages;
    return data::builtin_digits(split, count == 0 ? usual : count);
  }
  data::ImageSet images = data::load_mnist(source, split);
  if (images.rows != kImageSide || images.cols != kImageSide) {
    throw Error("data", "--data", fmt::format("images of {} x {} pixels in {}", images.rows, images.cols, source),
                fmt::format("{0} x {0}, one token a pixel", kImageSide));
  }
  if (count > images.count) {
    throw Error("data", option, std::to_string(count), "at most the " + std::to_string(images.count) + " in " + source);
  }
  if (count > 0) {
    images.count = count;
    images.pixels.resize(static_cast<std::size_t>(count * images.rows * images.cols));
    images.labels.resize(static_cast<std::size_t>(count));
  }
  return images;
}

SmnistData load_smnist(const std::string& source, std::int64_t train_images, std::int64_t test_images) {
  SmnistData data{
      load_images(source, data::Split::train, train_images), load_images(source, data::Split::test, test_images), {}};
  const std::string recorded =
      source == "builtin" ? source : std::filesystem::absolute(source).lexically_normal().string();
  data.description = train::describe(recorded, data.train, data.test);
  return data;
}

ThreadPool& use_threads(int threads) {
  // A step allocates and frees the same tensors of a few MB over and over. By default glibc gives them back to the
  // system each time, and clearing their pages anew took an eighth of the time.
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  set_threads(threads == 0 ? available_processors() : threads);
  ThreadPool& pool = default_pool();
  autograd::reserve_product_buffers(pool.threads());
  return pool;
}

void add_threads_option(CLI::App& command, int& threads) {
  command.add_option("--threads", threads, "Threads; 0: one for each processor. Does not change results")
      ->check(CLI::Range(0, 1024));
}

std::string shell_word(const std::string& word) {
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=,:+@%";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string words((std::istreambuf_iterator<char>(file)), {});
  std::string line;
  for (std::size_t at = 0; at < words.size(); at = words.find('\0', at) + 1) {
    line += (line.empty() ? "" : " ") + shell_word(words.c_str() + at);
    if (words.find('\0', at) == std::string::npos) break;
  }
  return line;
}

}  // namespace efla::cli
