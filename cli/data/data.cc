#include <unistd.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>

#include <fmt/core.h>

#include "cli/commands.h"
#include "cli/data/synthetic_data.h"
#include "cli/data/tokens.h"
#include "cli/support/print.h"
#include "efla/base/error.h"
#include "efla/data/mnist_download.h"

namespace efla::cli {
namespace {

using data::DownloadEvent;

constexpr double kMegabyte = 1e6;

// Prints one line per file; on a terminal also a line that counts while the file arrives.
class DownloadReport {
 public:
  void operator()(const DownloadEvent& event) {
    if (event.kind == DownloadEvent::Kind::progress) return show_progress(event);
    clear();
    const bool done = event.kind == DownloadEvent::Kind::done;
    downloaded_ += done;
    print_or_drop(stdout, fmt::format("{}: {} ({:.2f} MB)\n", event.name, done ? "downloaded" : "already there",
                                      static_cast<double>(event.bytes) / kMegabyte));
  }

  void clear() {
    if (shown_ < 0) return;
    print_or_drop(stderr, "\r\x1b[K");
    shown_ = -1;
  }

  int downloaded() const { return downloaded_; }

 private:
  void show_progress(const DownloadEvent& event) {
    // libcurl reports many times a second; the line changes only when the tenth of a megabyte does.
    const auto now = event.bytes / 100'000;
    if (!terminal_ || now == shown_) return;
    shown_ = now;
    const auto of = event.total > 0 ? fmt::format(" of {:.1f}", static_cast<double>(event.total) / kMegabyte) : "";
    print_or_drop(stderr,
                  fmt::format("\r\x1b[K{}: {:.1f}{} MB", event.name, static_cast<double>(event.bytes) / kMegabyte, of));
  }

  const bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  std::int64_t shown_ = -1;
  int downloaded_ = 0;
};

void run_mnist(const std::string& out, const std::string& url) {
  if (!url.starts_with("http://") && !url.starts_with("https://")) {
    throw Error("data mnist", "--url", "'" + url + "'", "an address that begins with http:// or https://");
  }
  DownloadReport report;
  try {
    data::download_mnist(out, url, std::ref(report));
  } catch (...) {
    report.clear();  // the message begins a line of its own
    throw;
  }
  fmt::print("MNIST is in {}: {} of {} files downloaded, all checked\n", out, report.downloaded(),
             data::kMnistFiles.size());
}

}  // namespace

void add_data(CLI::App& program) {
  auto* command = program.add_subcommand("data", "Get data sets, turn text into tokens, look at synthetic tasks");
  command->require_subcommand(1);

  struct Options {
    std::string out;
    std::string url{data::kMnistUrl};
  };
  const auto options = std::make_shared<Options>();
  auto* mnist =
      command->add_subcommand("mnist", "Download MNIST's four files and check them; resumes after an interruption");
  mnist->add_option("--out", options->out, "Folder for the files; created if it does not exist")->required();
  mnist->add_option("--url", options->url, "Address of a mirror; the names of the files are appended")
      ->capture_default_str();
  mnist->callback([options] { run_mnist(options->out, options->url); });
  add_token_commands(*command);
  add_show(*command);
}

}  // namespace efla::cli
