// llama.cpp's own end of a measurement, without Python: its plain decoding and its own speculation (libllama-common).
//
// The protocol is that of line_server.py. Every setting has `part` (the folder of its model.gguf) and may have
// `flash_attn` (bool), `types` (names of llama.cpp's --spec-type), `draft` (the folder of a draft's model.gguf), `n_max`,
// `n_min`, `p_min` (of drafting), and `size_n`, `size_m`, `min_hits` (of ngram-simple and ngram-map). Compiled at set-up
// against the headers of the source package and the libraries of the wheel that was built from it.

#include "common.h"
#include "llama.h"
#include "log.h"
#include "sampling.h"
#include "speculative.h"

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

using json = nlohmann::json;

static const int N_CTX = 4096;

static double wall() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double cpu() {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

static json peak_mb() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmHWM:", 0) == 0) {
            return std::stod(line.substr(6)) / 1024;
        }
    }
    return nullptr;
}

// The target in one setting, with its draft where it has one.
class Setting {
public:
    Setting(const std::string & folder, const json & options, int threads) {
        params.model.path = folder + "/" + options.at("part").get<std::string>() + "/model.gguf";
        params.n_ctx = params.n_batch = N_CTX;
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads;
        if (options.contains("flash_attn")) {
            const bool on = options.at("flash_attn");
            params.flash_attn_type = on ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        }
        const bool speculates = options.contains("types");
        if (speculates) {
            choose_drafts(folder, options, threads);
        }
        loaded = common_init_from_params(params);
        target = loaded->context();
        if (target == nullptr) {
            throw std::runtime_error("cannot load " + params.model.path);
        }
        if (speculates) {
            auto draft_params = common_base_params_to_speculative(params);
            draft_loaded = common_speculative_init_from_params(draft_params, loaded->model(), target);
            params.speculative.draft.ctx_tgt = target;
            params.speculative.draft.ctx_dft = draft = draft_loaded->context();
            speculation.reset(common_speculative_init(params.speculative, 1));
            if (!speculation) {
                throw std::runtime_error("llama.cpp cannot speculate with " + options.at("types").dump());
            }
        }
    }

    json decode(const json & request) {
        const std::vector<llama_token> prompt = request.at("prompt");
        const size_t n_tokens = request.at("n_tokens");
        if (prompt.size() + n_tokens + 64 > size_t(N_CTX)) {
            throw std::runtime_error("the prompt and " + std::to_string(n_tokens) + " tokens do not fit the context");
        }
        forget();
        common_sampler_ptr sampler = make_sampler(request);

        const double started = wall();
        prefill(prompt);
        double first = 0, first_cpu = 0;
        size_t n_first = 0;
        int rounds = 0, n_drafted = 0, n_accepted = 0;
        while (generated.size() < n_tokens) {
            const auto [drafted, new_tokens] = step(sampler.get(), n_tokens - generated.size());
            generated.insert(generated.end(), new_tokens.begin(), new_tokens.end());
            if (n_first == 0) {
                first = wall();
                first_cpu = cpu();
                n_first = new_tokens.size();
                continue;
            }
            rounds += 1;
            n_drafted += drafted;
            n_accepted += int(new_tokens.size()) - 1;
        }
        const double seconds = wall() - first, cpu_s = cpu() - first_cpu;
        generated.resize(n_tokens);
        json answer = {{"tokens", generated}, {"first_tokens", n_first}, {"ttft_s", first - started},
                       {"seconds", seconds}, {"cpu_s", cpu_s}, {"peak_rss_mb", peak_mb()}, {"rounds", rounds},
                       {"drafted", nullptr}, {"accepted", nullptr}, {"by_position", nullptr}, {"host_s", nullptr}};
        if (speculation) {
            answer["drafted"] = n_drafted;
            answer["accepted"] = n_accepted;
        }
        return answer;
    }

    // Teacher-forced logits [n, n_vocab] in numpy's file format: row i predicts continuation[i].
    json logits(const json & request) {
        const std::vector<llama_token> prompt = request.at("prompt"), continuation = request.at("continuation");
        const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(loaded->model()));
        std::ofstream file(request.at("path").get<std::string>(), std::ios::binary);
        write_npy_header(file, continuation.size(), size_t(n_vocab));
        forget();
        prefill(prompt);
        for (const llama_token next : continuation) {
            common_batch batch(target);
            batch.add(last, llama_pos(committed.size()), 0, true);
            run(batch);
            file.write(reinterpret_cast<const char *>(llama_get_logits_ith(target, -1)), 4 * n_vocab);
            committed.push_back(last);
            last = next;
        }
        if (!file.flush()) {
            throw std::runtime_error("cannot write the logits");
        }
        return {{"rows", continuation.size()}};
    }

private:
    static void write_npy_header(std::ofstream & file, size_t rows, size_t columns) {
        std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(rows) + ", " +
                             std::to_string(columns) + "), }";
        header.resize(128 - 10 - 1, ' ');  // the magic, the version and the length before it take 10 bytes
        header += '\n';
        const uint16_t length = uint16_t(header.size());
        file << "\x93NUMPY" << '\x01' << '\0' << char(length & 0xff) << char(length >> 8) << header;
    }

    void choose_drafts(const std::string & folder, const json & options, int threads) {
        auto & s = params.speculative;
        s.types = common_speculative_types_from_names(options.at("types").get<std::vector<std::string>>());
        if (options.contains("draft")) {
            s.draft.mparams.path = folder + "/" + options.at("draft").get<std::string>() + "/model.gguf";
        }
        s.draft.cpuparams.n_threads = s.draft.cpuparams_batch.n_threads = threads;
        s.draft.n_max = options.value("n_max", s.draft.n_max);
        s.draft.n_min = options.value("n_min", s.draft.n_min);
        s.draft.p_min = options.value("p_min", s.draft.p_min);
        for (auto * map : {&s.ngram_simple, &s.ngram_map_k, &s.ngram_map_k4v}) {
            map->size_n = options.value("size_n", map->size_n);
            map->size_m = options.value("size_m", map->size_m);
            map->min_hits = options.value("min_hits", map->min_hits);
        }
        const auto limits = common_speculative_get_output_limits(params.n_batch, params.n_parallel,
                                                                 common_speculative_n_max(&s));
        params.n_outputs_max = limits.total;
        params.n_outputs_max_per_seq = limits.per_seq;
    }

    // Only what the request asks for, in the order of the other engines: temperature first.
    common_sampler_ptr make_sampler(const json & request) const {
        common_params_sampling sampling = params.sampling;
        sampling.seed = request.at("seed");
        if (request.at("temperature").get<float>() > 0) {
            sampling.temp = request.at("temperature");
            sampling.top_p = request.at("top_p");
            sampling.samplers = {COMMON_SAMPLER_TYPE_TEMPERATURE, COMMON_SAMPLER_TYPE_TOP_P};
        } else {
            sampling.temp = 0;
            sampling.top_k = 1;
            sampling.samplers = {COMMON_SAMPLER_TYPE_TOP_K};
        }
        return common_sampler_ptr(common_sampler_init(loaded->model(), sampling));
    }

    void forget() {
        committed.clear();
        generated.clear();
        llama_memory_clear(llama_get_memory(target), true);
        if (draft != nullptr) {
            llama_memory_clear(llama_get_memory(draft), true);
        }
    }

    // Everything but the prompt's last token, which the first step takes.
    void prefill(const std::vector<llama_token> & prompt) {
        common_batch batch(target);
        for (size_t i = 0; i + 1 < prompt.size(); i++) {
            batch.add(prompt[i], llama_pos(i), 0, false);
        }
        run(batch);
        last = prompt.back();
        committed.assign(prompt.begin(), prompt.end() - 1);
        if (speculation) {
            common_speculative_begin(speculation.get(), 0, committed);
        }
    }

    void run(common_batch & batch) {
        if (batch.size() == 0) {
            return;
        }
        if (llama_process(target, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            throw std::runtime_error("llama.cpp cannot decode a batch");
        }
        if (speculation && !common_speculative_process(speculation.get(), batch)) {
            throw std::runtime_error("llama.cpp's draft cannot take a batch");
        }
    }

    // One round: how many tokens were drafted, and those that came of it, the target's own last.
    std::pair<int, llama_tokens> step(common_sampler * sampler, size_t wanted) {
        const auto n_past = llama_pos(committed.size());
        llama_tokens proposal;
        if (speculation && wanted > 1) {
            auto & asked = common_speculative_get_draft_params(speculation.get(), 0);
            asked = {true, int32_t(wanted) - 1, n_past, last, &committed, &proposal};
            common_speculative_draft(speculation.get());
            cut(draft, n_past);
        }
        common_batch batch(target);
        batch.add(last, n_past, 0, true);
        for (size_t i = 0; i < proposal.size(); i++) {
            batch.add(proposal[i], n_past + 1 + llama_pos(i), 0, true);
        }
        run(batch);
        const llama_tokens tokens = common_sampler_sample_and_accept_n(sampler, target, proposal);
        if (speculation) {
            common_speculative_accept(speculation.get(), 0, uint16_t(tokens.size() - 1));
        }
        committed.push_back(last);
        committed.insert(committed.end(), tokens.begin(), tokens.end() - 1);
        last = tokens.back();
        cut(target, llama_pos(committed.size()));
        cut(draft, llama_pos(committed.size()));
        return {int(proposal.size()), tokens};
    }

    static void cut(llama_context * context, llama_pos length) {
        if (context != nullptr) {
            llama_memory_seq_rm(llama_get_memory(context), 0, length, -1);
        }
    }

    common_params params;
    common_init_result_ptr loaded;
    common_speculative_init_result_ptr draft_loaded;
    llama_context *target = nullptr, *draft = nullptr;
    common_speculative_ptr speculation;
    llama_tokens committed, generated;  // committed: what is in the target's cache
    llama_token last = 0;
};

static void write(FILE * out, const json & answer) {
    std::fprintf(out, "%s\n", answer.dump().c_str());
    std::fflush(out);
}

int main(int argc, char ** argv) {
    FILE * out = fdopen(dup(1), "w");  // a channel of its own: what the library prints goes to stderr
    dup2(2, 1);
    const double started = wall();
    std::map<std::string, std::unique_ptr<Setting>> settings;
    try {
        const json given = json::parse(argc > 1 ? argv[1] : "");
        common_log_set_verbosity_thold(LOG_LEVEL_ERROR);
        common_init();
        llama_backend_init();
        for (const auto & [name, options] : given.at("settings").items()) {
            settings[name] = std::make_unique<Setting>(given.at("model"), options, given.at("threads"));
        }
        write(out, {{"ready", true}, {"engine", "llama.cpp"}, {"version", LLAMA_CPP_PACKAGE},
                    {"settings", given.at("settings")}, {"threads", given.at("threads")},
                    {"load_s", wall() - started}});
    } catch (const std::exception & error) {
        write(out, {{"error", error.what()}});
        return 1;
    }
    for (std::string line; std::getline(std::cin, line);) {
        try {
            const json request = json::parse(line);
            const std::string name = request.at("setting"), what = request.at("do");
            if (settings.count(name) == 0) {
                throw std::runtime_error("was started without the setting " + name);
            }
            if (what != "decode" && what != "logits") {
                throw std::runtime_error("has no answer to " + what);
            }
            write(out, what == "decode" ? settings[name]->decode(request) : settings[name]->logits(request));
        } catch (const std::exception & error) {
            write(out, {{"error", error.what()}});
        }
    }
    return 0;
}
