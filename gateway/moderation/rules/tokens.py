# Tokens of services by how they start, and what follows: a table to add to. A start stands in every token; what follows
# is at least as long here as services make it. Where a start is a word's end or little more, what follows has to look
# random as well.

from __future__ import annotations

_HEX, _ALNUM, _WORD = "[0-9a-f]", "[A-Za-z0-9]", r"[\w-]"
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

# name -> {start: what follows}
TOKENS: dict[str, dict[str, str]] = {
    "openai_key": {"sk-": rf"(?:(?:proj|svcacct|admin|None)-{_WORD}{{20}}|{_ALNUM}{{32}})"},
    "google_key": {"AIza": rf"{_WORD}{{35}}", "AQ.Ab8": rf"{_WORD}{{40}}"},
    "huggingface_token": {"hf_": "[A-Za-z]{30}", "api_org_": "[A-Za-z]{30}"},
    "npm_token": {"npm_": f"{_ALNUM}{{36}}"},
    "sendgrid_key": {"SG.": rf"{_WORD}{{16,32}}\.{_WORD}{{16}}"},
    "twilio_key": dict.fromkeys(("SK", "AC"), f"{_HEX}{{32}}(?!{_HEX})"),
    "databricks_token": {"dapi": f"{_HEX}{{32}}"},
    "jwt": {"eyJ": rf"{_WORD}{{8,300}}+\.eyJ{_WORD}{{8}}"},
    "tollgate_key": {"tg-": rf"{_WORD}{{43}}", "tgadmin-": rf"{_WORD}{{43}}", "whsec_": "[A-Za-z0-9+/=]{24}"},
    "gitlab_token": {
        **dict.fromkeys(
            ("glpat-", "glptt-", "gldt-", "glrt-", "gloas-", "glft-", "glagent-", "glcbt-", "glimt-", "glsoat-"),
            rf"{_WORD}{{20}}",
        ),
        "GR1348941": rf"{_WORD}{{20}}",
    },
    "model_service_key": {
        "gsk_": f"{_ALNUM}{{40}}",
        "xai-": f"{_ALNUM}{{60}}",
        "pplx-": f"{_ALNUM}{{40}}",
        "nvapi-": rf"{_WORD}{{60}}",
        "sk-or-v1-": f"{_HEX}{{40}}",
        "sk-lf-": _UUID,
        "sk_": f"{_HEX}{{48}}",
        "csk-": "[a-z0-9]{48}",
        "r8_": f"{_ALNUM}{{30}}",
        "tgp_v1_": rf"{_WORD}{{40}}",
        "lsv2_": rf"(?:pt|sk)_{_HEX}{{32}}",
        "pcsk_": r"\w{40}",
        "tvly-": rf"{_WORD}{{32}}",
        "jina_": rf"{_HEX}{{32}}{_WORD}{{20}}",
        "wandb_v1_": rf"{_WORD}{{40}}",
        "ABSK": "[A-Za-z0-9+/]{100}",
    },
    "service_token": {
        **dict.fromkeys(("dckr_pat_", "dckr_oat_"), rf"{_WORD}{{20}}"),
        "glsa_": r"\w{32}",
        "glc_eyJ": "[A-Za-z0-9+/=]{40}",
        **dict.fromkeys(("hvs.", "hvb."), rf"{_WORD}{{24}}"),
        "lin_api_": f"{_ALNUM}{{32}}",
        "ntn_": f"{_ALNUM}{{32}}",
        "sbp_": f"{_HEX}{{40}}",
        "sb_secret_": rf"{_WORD}{{22}}",
        "figd_": rf"{_WORD}{{32}}",
        "PMAK-": f"{_HEX}{{24}}",
        "NRAK-": "[A-Z0-9]{20}",
        **dict.fromkeys(("dp.pt.", "dp.ct.", "dp.sa."), r"\w{32}"),
        "dp.st.": r"(?:[a-z0-9_-]{2,35}\.)?\w{40}",
        "pscale_": rf"(?:tkn|oauth|pw)_{_WORD}{{24}}",
        "ATATT3": rf"{_WORD}{{40}}",
        "ATBB": f"{_ALNUM}{{28}}(?!{_ALNUM}{{8}})",
        "AGE-SECRET-KEY-1": "[A-Z0-9]{40}",
        "rubygems_": f"{_HEX}{{48}}",
        "CLOJARS_": f"{_HEX}{{60}}",
        "oy2": "[a-z0-9]{43}(?![A-Za-z0-9])",
        "xkeysib-": f"{_HEX}{{64}}",
        "HRKU-AA": rf"{_WORD}{{40}}",
        "nfp_": f"{_ALNUM}{{36}}",
        **dict.fromkeys(("vcp_", "vck_", "vci_", "vca_"), f"{_ALNUM}{{24}}"),
        "fm2_": "[A-Za-z0-9+/=]{60}",
        "v1.0-": f"{_HEX}{{24}}-{_HEX}{{100}}",
        "LTAI": f"{_ALNUM}{{20}}(?!{_ALNUM})",
        "AKID": f"{_ALNUM}{{32}}(?!{_ALNUM})",
        "pul-": f"{_HEX}{{40}}",
        "ops_eyJ": "[A-Za-z0-9+/=_-]{100}",
        "sntrys_eyJ": "[A-Za-z0-9+/=]{40}",
        "sntryu_": f"{_HEX}{{64}}",
        "hcaik_01": "[a-z0-9]{50}",
        "dt0c01.": r"[A-Z0-9]{24}\.[A-Z0-9]{64}",
        "phx_": f"{_ALNUM}{{40}}",
        "secret_": f"{_ALNUM}{{43}}(?!{_WORD})",
        "pat": rf"{_ALNUM}{{14}}\.{_HEX}{{64}}",
        "pat-": rf"(?:na|eu|ap)\d-{_UUID}",
        "pk_": r"\d{6,9}_[A-Z0-9]{32}",
        "CFPAT-": rf"{_WORD}{{40}}",
        "tfp_": rf"{_WORD}{{40}}",
        "sl.": rf"(?:u\.)?{_WORD}{{100}}",
        "EAA": f"{_ALNUM}{{100}}",
        "EAAA": rf"{_WORD}{{60}}(?!{_WORD})",
        "bkua_": f"{_HEX}{{40}}",
        "CCIPAT_": rf"{_ALNUM}{{20,24}}_{_HEX}{{40}}",
        **dict.fromkeys(("sqp_", "squ_", "sqa_"), f"{_HEX}{{40}}"),
        "AKCp": f"{_ALNUM}{{60}}",
        "tskey-": rf"[a-z]{{3,10}}-{_WORD}{{20}}",
        "sgp_": rf"(?:{_HEX}{{16}}_)?{_HEX}{{40}}",
        "apify_api_": f"{_ALNUM}{{30}}",
        "sk.eyJ": rf"{_WORD}{{40,300}}+\.{_WORD}{{20}}",
        "EZAK": f"{_ALNUM}{{54}}",
        "shippo_live_": f"{_HEX}{{40}}",
        "live_": f"{_HEX}{{35}}(?!{_HEX})",
        "rzp_live_": f"{_ALNUM}{{14}}",
        "access-production-": _UUID,
        "access-development-": _UUID,
        "FLWSECK-": rf"{_HEX}{{32}}",
        "sq0csp-": rf"{_WORD}{{40}}",
        "sq0atp-": rf"{_WORD}{{22}}",
        "napi_": "[a-z0-9]{60}",
    },
}

# The same, of which a name in code may begin alike: what was found has to look random.
RANDOM_TOKENS: dict[str, dict[str, str]] = {
    "model_service_key": {
        "fw_": f"{_ALNUM}{{20,24}}(?!{_WORD})",
        "fc-": f"{_HEX}{{32}}(?!{_WORD})",
        "pa-": rf"{_WORD}{{43}}(?!{_WORD})",
    },
    "service_token": {
        "key-": f"{_HEX}{{32}}(?!{_WORD})",
        "re_": rf"{_ALNUM}{{8}}_{_ALNUM}{{20,24}}(?!{_WORD})",
        "rnd_": f"{_ALNUM}{{28}}(?!{_WORD})",
        "cio": f"{_ALNUM}{{32}}(?!{_WORD})",
    },
}

# What has no start of its own: what stands in every one -> the whole, from there on, looking back for the rest.
MARKED: dict[str, str] = {
    "-us": rf"-us(?<={_HEX}{{32}}-us)\d{{1,2}}(?!\w)",  # Mailchimp
    "/webhooks/": rf"/api/webhooks/\d{{17,20}}/{_WORD}{{60}}",  # Discord
    "/IncomingWebhook/": f"/IncomingWebhook/{_HEX}{{32}}",  # Microsoft Teams
    "Q~": rf"Q~(?<={_WORD}{{3}}\dQ~)[\w~.-]{{31,34}}(?![\w~.-])",  # Microsoft Entra
    "sig=": r"[?&]sig=[A-Za-z0-9%+/]{40,200}(?:%3[Dd]|=)",  # Azure, shared access
    ".atlasv1.": rf"\.atlasv1\.{_WORD}{{60}}",  # Terraform
    "FFNRAL": f"FFNRAL(?<={_HEX}{{36}}FFFFNRAL)",  # New Relic
    "$production$": rf"access_token\$production\${_ALNUM}{{16}}\${_HEX}{{32}}",  # Braintree
    "SSWS ": rf"SSWS {_WORD}{{30}}",  # Okta
}
