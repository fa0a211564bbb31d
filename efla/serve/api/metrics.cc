#include "efla/serve/api/metrics.h"

#include "efla/base/text.h"

namespace efla::serve {
namespace {

class Writer {
 public:
  void add(const char* name, const char* type, const char* help) {
    name_ = std::string("efla:") + name;
    text_ += "# HELP " + name_ + " " + help + "\n# TYPE " + name_ + " " + type + "\n";
  }
  template <class Number>
  void value(Number number, const std::string& labels = {}, const char* suffix = "") {
    text_ += name_ + suffix + (labels.empty() ? "" : "{" + labels + "}") + " " + value_text(number) + "\n";
  }
  template <class Number>
  void one(const char* name, const char* type, const char* help, Number number) {
    add(name, type, help);
    value(number);
  }
  void histogram(const char* name, const char* help, const engine::Histogram& histogram) {
    add(name, "histogram", help);
    std::uint64_t below = 0;
    for (std::size_t i = 0; i < histogram.bounds.size(); ++i) {
      below += histogram.counts[i];
      value(below, "le=\"" + value_text(histogram.bounds[i]) + "\"", "_bucket");
    }
    value(histogram.total(), "le=\"+Inf\"", "_bucket");
    value(histogram.sum, "", "_sum");
    value(histogram.total(), "", "_count");
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_, name_;
};

}  // namespace

std::string metrics_text(const engine::Statistics& s, const std::map<int, std::uint64_t>& replies,
                         std::int64_t connections, std::int64_t request_bytes) {
  Writer out;
  out.histogram("time_to_first_token_seconds", "From the request to the first token.", s.first_token_seconds);
  out.histogram("inter_token_latency_seconds", "From a token to the next of the same reply.", s.between_tokens_seconds);
  out.histogram("request_queue_time_seconds", "From the request to a slot.", s.queue_seconds);
  out.one("num_requests_running", "gauge", "Requests that have a slot.", s.running);
  out.one("num_requests_waiting", "gauge", "Requests that wait for a slot.", s.queued);
  out.one("slots", "gauge", "Slots of the states of texts.", s.slots);
  out.one("slot_bytes", "gauge", "Bytes of one slot.", s.slot_bytes);
  out.one("pages", "gauge", "Pages of the keys and values of texts that run.", s.pages);
  out.one("page_bytes", "gauge", "Bytes of one page.", s.page_bytes);
  out.one("kv_cache_usage_perc", "gauge", "Pages that are reserved for texts that run; 1: all.",
          s.pages == 0 ? 0.0 : static_cast<double>(s.used_pages) / static_cast<double>(s.pages));
  out.one("sessions", "gauge", "Stored sessions.", s.sessions);
  out.one("session_bytes", "gauge", "Bytes of stored sessions in memory.", s.session_bytes);
  out.one("sessions_set_aside", "gauge", "Files of sessions that the start could not load and has renamed.",
          s.set_aside);
  out.one("swapped_bytes", "gauge", "Bytes of stored sessions in files.", s.swapped_bytes);
  out.one("prefix_cache_bytes", "gauge", "Bytes of the prefix cache.", s.cache_bytes);
  out.one("prefix_cache_entries", "gauge", "States in the prefix cache.", s.cache_entries);
  out.one("prefix_cache_queries_total", "counter", "Tokens of prompts that may use the prefix cache.", s.cache_queries);
  out.one("prefix_cache_hits_total", "counter", "Tokens of prompts that the prefix cache had.", s.cache_hits);
  out.one("prompt_tokens_total", "counter", "Tokens of prompts.", s.prompt_tokens);
  out.one("generation_tokens_total", "counter", "Tokens of replies.", s.completion_tokens);
  out.one("spec_decode_num_draft_tokens_total", "counter", "Tokens of drafts of replies.", s.drafted_tokens);
  out.one("spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens that replies drew.", s.accepted_tokens);
  out.one("steps_total", "counter", "Steps of the engine.", s.steps);
  out.add("request_success_total", "counter", "Requests of the engine by how they ended.");
  for (const auto& [reason, count] : s.finished) {
    out.value(count, "finished_reason=\"" + std::string(name_of(reason)) + "\"");
  }
  out.add("http_replies_total", "counter", "Replies by status.");
  for (const auto& [status, count] : replies) out.value(count, "status=\"" + std::to_string(status) + "\"");
  out.one("http_connections", "gauge", "Open connections.", connections);
  out.one("http_request_bytes", "gauge", "Bytes of memory that requests hold: bodies, what is made of them, replies.",
          request_bytes);
  return out.take();
}

}  // namespace efla::serve
