// Which runs a study of synthetic tasks has: its plan.toml, read.
//
// The settings of a scale are
//   mixers, seeds, lr, weight_decay   lists; every combination is a run of each setting of each task
//     mixers         names, or NAME:N for N steps per token of a mixer that has several (deltaproduct)
//   tasks            {name, title, parameters, hidden, examples, epochs or steps, vary}
//     title          stands in tables for the name
//     hidden         the model's width, with a head per 64
//     examples       size of the training set that epochs visit; without it every step draws new examples
//     vary           {parameter = values}: each value makes a setting that differs from the baseline in this parameter
//                    alone (examples is the training set's size)
//   times            lengths of the tests, as multiples of the training length
//   test, tests      a task, and the parameters of each test of it, in place of times
//   deciding_tests   how many of the first tests choose learning rate and weight decay (1)
//   test_examples    examples per test (1000)
//   evaluations      during training without epochs (10); with epochs there is one after each
//   enough           accuracy on the first test that ends a training
//   model            {hidden, layers, heads, head_dim}
//   precision        of matrix products on a GPU: float32 (the default) or bfloat16
//   training         {batch_size, lr_floor, clip}
//   figures          accuracy in per cent in a paper: task → mixer → [[mean, deviation], ...] by test
//   eigenvalues      whether the report shows the mixers' eigenvalues
//   caveat           what results of this scale cannot be taken for
#pragma once

#include <string>
#include <vector>

#include "experiments/common/plan.h"
#include "experiments/synthetic/run.h"

namespace efla::experiments {

// Returns every run: seeds × tasks × learning rates × settings × mixers × weight decays, in this order. So an
// interrupted study compares its mixers in every setting of a task at the first learning rate before it tries the next
// rate. Throws Error for a run that no model or training can have.
std::vector<SyntheticRun> plan_runs(const nlohmann::json& settings);

// Returns the name of a task or of a setting as a part of names of folders and of HTML ids.
std::string word_of(std::string name);

// Returns the study of a plan: its runs, and its report.
Study synthetic_study(const Plan& plan);

}  // namespace efla::experiments
