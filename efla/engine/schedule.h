// Who computes next: the decisions of the engine, without a model, threads or clocks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace efla::engine {

// A step decodes one token of every reply and reads as many ids of prompts as fit its time. These ids are distributed
// in pieces, which end where a prompt may be cut: each piece goes to the client that has waited longest, and to the
// request of this client that has waited longest. A request that begins therefore waits for the rest of one step,
// however long the other prompts are.
class Schedule {
 public:
  struct Limits {
    std::int64_t step_tokens = 512;                 // most ids of prompts per step
    std::chrono::duration<double> step_time{0.05};  // a step takes fewer ids if more would take longer
    std::int64_t cut_tokens = 64;                   // a prompt may be cut at multiples of this many tokens of the text
    std::int64_t least_tokens = 64;                 // a step takes this many ids, however long they take
    std::int64_t draft_tokens = 0;                  // most tokens of a draft
    std::int64_t most_drafting = 0;                 // most texts of a step with drafts
    std::int64_t most_decoded = 1;                  // most tokens of all drafts of a step, with the ones before them
  };

  explicit Schedule(const Limits& limits) : limits_(limits) {}

  // A request in the queue.
  struct Waiting {
    const std::string* client;
    std::uint64_t id;  // requests have rising ids
  };
  // Returns the request that begins next: of the client with the fewest running requests, among equals of the client
  // served longest ago, of these the oldest. running: the number of running requests by client.
  std::size_t next(std::span<const Waiting> waiting, const std::map<std::string, std::int64_t>& running) const;
  // Returns when a client was served last, counted in pieces; 0: never. A request begins with this as its last_served.
  std::uint64_t served(const std::string& client) const;

  // A prompt that is being read.
  struct Prompt {
    const std::string* client;
    std::uint64_t id;
    std::uint64_t last_served;         // of the request; distribute sets it
    std::int64_t position;             // tokens of the text before the next id
    std::int64_t left;                 // ids that can be read together from here
    std::vector<std::int64_t> pauses;  // numbers of ids after which the step reads no more of this prompt
    std::int64_t tokens = 0;           // of the step; distribute sets them
  };
  // Distributes the ids that the next step reads among the prompts.
  void distribute(std::vector<Prompt>& prompts);
  // Learns from a step how long reading takes.
  void learn(std::int64_t tokens, std::chrono::duration<double> time);

  // Returns the most tokens of each draft in a step that decodes this many texts.
  std::int64_t most_drafted(std::int64_t texts) const;

  // Removes the times of clients that have no request running, so that there is a bound to them.
  void forget_clients(const std::function<bool(const std::string&)>& has_request);

 private:
  std::int64_t step_tokens() const;
  bool is_done(const Prompt& prompt) const;
  std::int64_t piece_of(const Prompt& prompt) const;

  Limits limits_;
  std::chrono::duration<double> per_token_{0};  // time per token of a prompt; 0: not known yet
  std::uint64_t served_ = 0;                    // pieces so far
  std::map<std::string, std::uint64_t> client_served_;
};

}  // namespace efla::engine
