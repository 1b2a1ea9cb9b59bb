// Greedy decoding with prompt lookup, without Python:
//
//   specdec convert --model_dir DIR_OR_GGUF --output_dir model
//   cmake -S examples/cpp -B build/example \
//     -Dspecdec_DIR="$(python -c 'import specdec_ext; print(specdec_ext.cmake_dir())')"
//   cmake --build build/example
//   build/example/generate model 32 10 2 504 3575 28 < /dev/null
//
// generate FOLDER MAX_TOKENS DRAFTS NGRAM [TOKEN...]: the ids of the prompt are arguments, or words
// of stdin. Prints the ids of the output; how many passes it took goes to stderr. DRAFTS = 0
// decodes plainly.
#include <specdec/executor.h>
#include <specdec/model.h>
#include <specdec/pages.h>

#include <algorithm>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int kPageSize = 32;
constexpr int kMaxRows = 128;  // of one step

struct Arguments {
  std::string folder;
  int max_tokens = 0, drafts = 0, ngram = 0;
  std::vector<specdec::TokenId> prompt;
};

Arguments read_arguments(int argc, char** argv) {
  if (argc < 5) {
    throw std::invalid_argument("usage: generate FOLDER MAX_TOKENS DRAFTS NGRAM [TOKEN...]");
  }
  Arguments found{argv[1], std::stoi(argv[2]), std::stoi(argv[3]), std::stoi(argv[4]), {}};
  for (int i = 5; i < argc; ++i) found.prompt.push_back(std::stoi(argv[i]));
  if (argc == 5) {
    for (specdec::TokenId token; std::cin >> token;) found.prompt.push_back(token);
  }
  return found;
}

void generate(const Arguments& asked) {
  const int length = static_cast<int>(asked.prompt.size()) + asked.max_tokens;
  specdec::CpuModel model(asked.folder, kMaxRows, length);
  // Room for the text, and for the drafts of a step behind it.
  const int num_pages = (length + kMaxRows) / kPageSize + 1;
  specdec::CpuPages pages(model, num_pages, kPageSize);
  model.decoder().bind_cache(pages.k(), pages.v());

  specdec::ExecutorConfig config;
  config.vocab_size = model.config().vocab_size;
  config.max_batch_size = 1;
  config.max_seq_len = length;
  config.max_num_tokens = kMaxRows;
  config.num_pages = num_pages;
  config.page_size = kPageSize;
  config.adaptive = false;
  if (asked.drafts > 0) {
    config.method = specdec::DraftMethod::kNgram;
    config.ngram.max_draft_len = asked.drafts;
    config.ngram.max_matching_ngram_size = asked.ngram;
  }
  specdec::Executor executor(config);
  executor.run_on_host(pages.view(), specdec::cpu_backend());

  specdec::RequestParams params;
  params.prompt = asked.prompt;
  params.max_tokens = asked.max_tokens;
  params.eos_token_ids = model.eos_token_ids();
  executor.submit(std::move(params));

  int passes = 0, accepted = 0;
  std::vector<specdec::TokenId> ids;
  while (executor.num_unfinished() > 0 && executor.plan() != nullptr) {
    const specdec::StepPlan* plan = executor.build();
    ids.resize(plan->num_logit_rows);
    model.decoder().forward_ids(plan->view(), ids.data());
    executor.commit(*plan, ids.data(), nullptr, 0);
    for (const specdec::StepOutput& out : executor.deliver()) {
      if (!out.error.empty()) throw std::runtime_error(out.error);
      for (specdec::TokenId token : out.tokens) std::cout << token << ' ' << std::flush;
      accepted += out.num_accepted;
    }
    ++passes;
  }
  std::cout << '\n';
  std::cerr << passes << " passes, " << accepted << " drafts accepted\n";
}

}  // namespace

int main(int argc, char** argv) {
  try {
    generate(read_arguments(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "generate: " << error.what() << '\n';
    return 1;
  }
}
