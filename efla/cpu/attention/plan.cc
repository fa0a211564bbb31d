#include "efla/cpu/attention/plan.h"

namespace efla::cpu {
namespace {

// Rows of q per task. A task reads each block of keys and values once for all of its rows, and keeps the rows and their
// sums in the second-level cache.
constexpr std::int64_t kTaskRows = 96;

// Tasks per thread, so that threads that are late can give tasks to others.
constexpr std::int64_t kTasksPerThread = 4;

// Tokens whose keys and values are written by one task.
constexpr std::int64_t kWriteTokens = kAttentionBlock;

// Greatest size of all partial sums, 256 MiB.
constexpr std::int64_t kMostPartialFloats = 1 << 26;

// Returns the number of segments with keys for rows of a run's tokens before token_end.
template <class S>
std::int64_t segments_of(const AttentionRun<S>& run, std::int64_t token_end) {
  return (run.begin + token_end + kAttentionSegment - 1) / kAttentionSegment;
}

// Cuts a run into rows of `tokens` tokens and `heads` heads; the cuts are at multiples of `tokens` of the text.
template <class S>
void cut_run(const AttentionForward<S>& p, std::int64_t run, std::int64_t row, std::int64_t tokens, std::int64_t heads,
             std::vector<AttentionRows>& rows) {
  const AttentionRun<S>& of = p.runs[static_cast<std::size_t>(run)];
  for (std::int64_t token = 0, end = 0; token < of.tokens; token = end) {
    end = std::min(of.tokens, ((of.begin + token) / tokens + 1) * tokens - of.begin);
    for (std::int64_t head = 0; head < p.shape.key_value_heads; head += heads) {
      rows.push_back({run, row, token, end, head, std::min(head + heads, p.shape.key_value_heads)});
    }
  }
}

// Returns the number of heads per task of a run with few rows. A task that computes the heads of a page one after the
// other reads memory from beginning to end, which is faster than the pieces of one head. But there must be enough
// tasks, a segment of some heads each.
template <class S>
std::int64_t heads_per_task(const AttentionForward<S>& p, std::int64_t tokens, int threads) {
  std::int64_t segments = 0;
  for (const auto& run : p.runs) segments += segments_of(run, run.tokens);
  const std::int64_t heads = p.shape.key_value_heads, rows = tokens * p.shape.group();
  return std::clamp<std::int64_t>(std::min(kTaskRows / rows, heads * segments / (kTasksPerThread * threads)), 1, heads);
}

// Returns a task's work: keys by rows.
double work_of(const AttentionShape& shape, const AttentionTask& task) {
  return static_cast<double>(task.segment_end) * static_cast<double>(task.rows.count(shape));
}

// Splits the tasks that are long compared with a thread's part of the work, one task per segment.
void split_tasks(const AttentionShape& shape, int threads, AttentionPlan& plan) {
  double total = 0;
  for (const auto& task : plan.tasks) total += work_of(shape, task);
  const auto is_long = [&](const AttentionTask& task) {
    return task.segment_end > 1 && kTasksPerThread * threads * work_of(shape, task) > total;
  };
  std::int64_t floats = 0;
  for (const auto& task : plan.tasks) {
    if (is_long(task)) floats += task.segment_end * AttentionSums::floats(shape, task.rows.count(shape));
  }
  if (threads == 1 || floats == 0 || floats > kMostPartialFloats) return;
  plan.partial_floats = floats;
  std::vector<AttentionTask> tasks;
  std::int64_t partial = 0;
  for (AttentionTask task : plan.tasks) {
    if (!is_long(task)) {
      tasks.push_back(task);
      continue;
    }
    task.partial = partial;
    plan.merges.push_back(task);
    for (std::int64_t segment = 0; segment < task.segment_end; ++segment) {
      tasks.push_back({task.rows, segment, segment + 1, partial});
      partial += AttentionSums::floats(shape, task.rows.count(shape));
    }
  }
  plan.tasks = std::move(tasks);
}

}  // namespace

template <class S>
AttentionPlan plan_attention(const AttentionForward<S>& p, int threads) {
  AttentionPlan plan;
  std::vector<AttentionRows> rows;
  const std::int64_t tokens = std::max<std::int64_t>(1, kTaskRows / p.shape.group());
  std::int64_t row = 0;
  for (std::size_t i = 0; i < p.runs.size(); ++i) {
    cut_run(p, static_cast<std::int64_t>(i), row, kWriteTokens, 1, plan.writes);
    cut_run(p, static_cast<std::int64_t>(i), row, tokens,
            heads_per_task(p, std::min(tokens, p.runs[i].tokens), threads), rows);
    row += p.runs[i].tokens;
  }
  for (const AttentionRows& of : rows) {
    plan.most_rows = std::max(plan.most_rows, of.count(p.shape));
    plan.tasks.push_back({of, 0, segments_of(p.runs[static_cast<std::size_t>(of.run)], of.token_end)});
  }
  split_tasks(p.shape, threads, plan);
  return plan;
}

template AttentionPlan plan_attention(const AttentionForward<float>&, int);
template AttentionPlan plan_attention(const AttentionForward<bfloat16>&, int);

}  // namespace efla::cpu
