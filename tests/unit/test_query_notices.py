"""A query that the model does not read, for its language or its length, gets a notice; others do not."""

from __future__ import annotations

import csv
import json
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gare.encoders import build_encoder
from gare.encoders.mini_encoder import MiniEncoderConfig
from gare.library.search.query_notices import guess_language, language_notice, length_notice
from gare.library.search.query_vectors import TextCache
from gare.model import GARE
from gare.model.known_models import KNOWN_MODELS, MANY, languages_of, model_that_reads

FOREIGN = {
    "es": """
        un perro corriendo en la playa; niños jugando al fútbol; puesta de sol; pastel de
        cumpleaños; gatito durmiendo en el sofá; coche rojo; la boda de mi hermana; gente bailando;
        olas del mar; una mujer cocina
    """,
    "fr": """
        un chien sur la plage; anniversaire de maman; le chat dort; des enfants qui jouent; voiture
        rouge dans la rue; coucher de soleil; une femme fait la cuisine; vacances à la montagne;
        mariage de ma sœur; chute de neige
    """,
    "de": """
        ein Hund am Strand; Kinder spielen Fußball; Sonnenuntergang; Kuchen mit Kerzen; meine Oma im
        Garten; rotes Auto; Frau kocht in der Küche; Hochzeit; schlafende Katze auf dem Sofa; Leute
        tanzen
    """,
    "pt": """
        um cachorro na praia; crianças brincando; pôr do sol; bolo de aniversário; gato dormindo no
        sofá; carro vermelho; mulher cozinhando; casamento da minha irmã; pessoas dançando; ondas do
        mar
    """,
    "it": """
        un cane sulla spiaggia; bambini che giocano; tramonto sul mare; torta di compleanno; gatto
        che dorme; macchina rossa; donna che cucina; matrimonio di mia sorella; gente che balla; le
        onde del mare
    """,
    "nl": """
        een hond op het strand; kinderen spelen voetbal; zonsondergang; taart met kaarsen voor een
        verjaardag; slapende kat op de bank; rode auto in de straat; vrouw kookt in de keuken;
        bruiloft van mijn zus; mensen dansen; golven op zee
    """,
    "pl": """
        pies na plaży; dzieci grają w piłkę; zachód słońca; tort urodzinowy ze świeczkami; śpiący
        kot na kanapie; czerwony samochód; kobieta gotuje obiad; wesele mojej siostry; ludzie
        tańczą; fale na morzu
    """,
    "tr": """
        sahilde koşan köpek; top oynayan çocuklar; gün batımı; doğum günü pastası; uyuyan kedi;
        kırmızı araba; yemek pişiren kadın; kız kardeşimin düğünü; dans eden insanlar; deniz
        dalgaları
    """,
    "sv": """
        en hund på stranden; barn som spelar fotboll; solnedgång över havet; födelsedagstårta;
        sovande katt i soffan; röd bil; en kvinna lagar mat; min systers bröllop; människor som
        dansar; vågor på havet
    """,
    "vi": """
        con chó chạy trên bãi biển; trẻ em chơi bóng đá; hoàng hôn; bánh sinh nhật; con mèo đang
        ngủ; xe hơi màu đỏ; phụ nữ nấu ăn; đám cưới của chị tôi; mọi người nhảy múa; sóng biển
    """,
    "id": """
        anjing di pantai; anak bermain bola; matahari terbenam; kue ulang tahun dengan lilin; kucing
        tidur di sofa; mobil merah; wanita sedang memasak; pernikahan kakak saya; orang menari;
        ombak di laut
    """,
    "ru": """
        собака на пляже; дети играют в футбол; закат; торт; кошка спит; красная машина; женщина
        готовит; свадьба; люди танцуют; волны
    """,
    "zh": """
        海滩上的狗; 孩子们踢足球; 日落; 生日蛋糕; 睡觉的猫; 红色的汽车;
        女人在做饭; 婚礼; 人们跳舞; 海浪
    """,
    "ja": """
        ビーチの犬; サッカーをする子供; 夕日の海; 誕生日ケーキ; 寝ている猫;
        赤い車; 料理をする女性; 妹の結婚式; 踊る人々; 波の音
    """,
    "ko": """
        해변의 개; 축구하는 아이들; 일몰; 생일 케이크; 자는 고양이; 빨간
        자동차; 요리하는 여자; 결혼식; 춤추는 사람들; 파도
    """,
    "ar": """
        كلب على الشاطئ; أطفال يلعبون كرة القدم; غروب; كعكة; قطة نائمة; سيارة حمراء; امرأة تطبخ;
        زفاف; ناس يرقصون; أمواج
    """,
    "hi": """
        समुद्र तट पर कुत्ता; बच्चे खेल रहे हैं; सूर्यास्त; केक; सोती बिल्ली; लाल कार; खाना बनाती
        महिला; शादी; लोग नाच रहे हैं; लहरें
    """,
}

OTHER_SUBJECTS = {
    "es": """
        avión despegando; el abuelo toca el piano; mi hijo en la escuela; fuegos artificiales; tormenta
        con rayos; partido de baloncesto; clase de matemáticas; barco en el puerto
    """,
    "fr": """
        avion qui décolle; mon grand-père joue du piano; feux d'artifice; orage; match de tennis; cours
        de maths; bateau au port; les vaches dans le pré
    """,
    "de": """
        Flugzeug startet; mein Opa spielt Klavier; Feuerwerk; Gewitter; Basketballspiel; Schule; Schiff
        im Hafen; Kühe auf der Weide
    """,
    "pt": """
        avião decolando; meu avô toca piano; fogos de artifício; tempestade; jogo de basquete; aula de
        matemática; barco no porto; vacas no pasto
    """,
    "it": """
        aereo che decolla; mio nonno suona il pianoforte; fuochi d'artificio; temporale; partita di
        pallacanestro; lezione di matematica; barca nel porto; mucche al pascolo
    """,
    "nl": """
        vliegtuig stijgt op; opa speelt piano; vuurwerk; onweer; basketbalwedstrijd; les op school;
        schip in de haven; koeien in de wei
    """,
    "pl": """
        samolot startuje; dziadek gra na pianinie; fajerwerki; burza z piorunami; mecz koszykówki;
        lekcja matematyki; statek w porcie; krowy na łące
    """,
    "tr": """
        uçak kalkıyor; dedem piyano çalıyor; havai fişek; fırtına; basketbol maçı; matematik dersi;
        limandaki gemi; ineklere bakan çiftçi
    """,
}
"""Written after the words of `language_words` were chosen."""

ENGLISH = """
    a dog; dog; beach; sunset; birthday cake; my grandmother; red car; los angeles at night; rio de
    janeiro; leonardo da vinci; la la land; cafe; café in paris; a piñata at a party; crème brûlée;
    jalapeño peppers; São Paulo; Zürich; Beyoncé dancing; el niño storm; a man named Juan; Maria; pizza;
    sushi chef; kindergarten; ballet; tango lesson; salsa dancing; 2019 holiday; 4k drone shot;
    IMG_2041; iphone 12 unboxing; woamn coking dinnr; skatebord triks; volkswagen beetle; the alps; les
    paul guitar; van gogh painting; das boot; game of thrones; minecraft lets play; bmw m3 drifting;
    snowboarding; wwe wrestling; spongebob squarepants; kids xmas 1998; taekwondo; mount fuji; rock n
    roll; dj set; barn owl; court; part two; auto repair; pour over coffee; son and father; grand canyon
"""


NAMES = """
    Neuschwanstein castle; Kilimanjaro; Côte d'Azur; Val d'Isère; Sacré-Cœur; Champs-Élysées; Playa del
    Carmen; Puerto Vallarta; Volodymyr Zelenskyy; Recep Tayyip Erdoğan; Antonín Dvořák; Gabriel García
    Márquez; Zlatan Ibrahimović bicycle kick; Lamborghini Huracán; Škoda Octavia; Citroën 2CV; Noël; döner
    kebab; Kraków market square; Nguyen wedding; Hagia Sophia; Île de la Cité; Björn Borg; Mont Saint Michel
"""
"""Names of other languages, as people write them in an English query."""


@pytest.fixture(scope="module")
def pieces():
    """Counts the tokens of the tower of gare-mini."""
    encoder = build_encoder(MiniEncoderConfig(), weights=False)
    return lambda text: int(encoder.tokenize([text])[1].sum()) - 2


def each(queries: str) -> list[str]:
    return [" ".join(query.split()) for query in queries.split(";")]


def test_other_languages_are_noticed(pieces):
    missed = {
        language: [query for query in each(queries) if guess_language(query, pieces(query)) is None]
        for language, queries in FOREIGN.items()
    }
    total = sum(len(each(queries)) for queries in FOREIGN.values())
    num_missed = sum(map(len, missed.values()))
    assert total == 170
    assert num_missed <= 0.1 * total, missed
    assert all(len(queries) <= 3 for queries in missed.values()), missed


def test_most_queries_about_other_subjects_are_noticed_too(pieces):
    """A single word that is in no list is not: to be silent is better than to be wrong."""
    queries = [query for part in OTHER_SUBJECTS.values() for query in each(part)]
    noticed = [query for query in queries if guess_language(query, pieces(query))]
    assert len(noticed) >= 0.6 * len(queries)


@pytest.mark.parametrize("text", ["Schmetterling", "kucing tidur", "papillon", "zwembad", "piscina"])
def test_one_word_that_only_another_language_has_is_enough(text):
    assert guess_language(text) is not None


@pytest.mark.parametrize(
    "text", ["Mont Blanc", "a psa about smoking", "nero growth", "piccolo", "ballet plié"]
)
def test_names_and_borrowed_words_are_not(text):
    assert guess_language(text) is None


def test_what_was_named_was_named_right(pieces):
    wrong: Counter[str] = Counter()
    for language, queries in FOREIGN.items():
        for query in each(queries):
            guess = guess_language(query, pieces(query))
            wrong[language] += guess is not None and guess[0] not in ("", language)
    assert sum(wrong.values()) <= 5, wrong


def test_ordinary_english_is_left_alone(pieces):
    alarms = [query for query in each(ENGLISH + ";" + NAMES) if guess_language(query, pieces(query))]
    assert alarms == []


@pytest.mark.parametrize("text", ["Perro en la playa", "Ein Hund Am Strand", "UN CHIEN SUR LA PLAGE"])
def test_a_capital_does_not_hide_a_language(text):
    """Telephones write the first letter large; two large ones are names, but not in German."""
    assert guess_language(text) is not None


def test_english_captions_raise_no_alarm(shared: Path, pieces):
    """Of real captions of five datasets, whole and as short queries of their rarer words."""
    captions = sorted(set(read_captions(shared / "annotations")))[::17]
    assert len(captions) > 5000
    alarms = [caption for caption in captions if guess_language(caption, pieces(caption))]
    assert len(alarms) < 0.005 * len(captions), alarms[:20]
    short = [" ".join(sorted(caption.split(), key=len)[-2:]) for caption in captions]
    alarms = [query for query in short if guess_language(query, pieces(query))]
    assert len(alarms) < 0.005 * len(short), alarms[:20]


def read_captions(folder: Path) -> Iterator[str]:
    for caption in json.loads((folder / "msvd" / "captions_msvd.json").read_text()).values():
        yield from caption
    for part in ("train", "val_1"):
        for video in json.loads((folder / "activitynet" / f"{part}.json").read_text()).values():
            yield from video["sentences"]
    with open(folder / "msrvtt" / "MSRVTT_JSFUSION_test.csv", newline="") as file:
        yield from (row["sentence"] for row in csv.DictReader(file))
    with zipfile.ZipFile(folder / "msrvtt" / "test_videodatainfo.json.zip") as archive:
        for name in archive.namelist():
            if name.endswith(".json") and not Path(name).name.startswith("."):
                yield from (row["caption"] for row in json.loads(archive.read(name))["sentences"])


def test_the_notice_names_the_language_the_model_and_what_reads_it():
    notice = language_notice(["ein Hund am Strand"], "gare-mini", ["en"])
    assert notice is not None
    for part in (
        "German",
        "gare-mini reads English only",
        "gare index --model google/siglip2-base-patch16-224",
    ):
        assert part in notice
    assert language_notice(["ein Hund am Strand"], "mine", []) is None  # not known what it reads
    assert language_notice(["ein Hund am Strand"], "siglip2", [MANY]) is None
    assert language_notice(["海滩上的狗"], "BAAI/AltCLIP", ["en", "zh"]) is None
    assert language_notice(["a dog", "海滩"], "gare-mini", ["en"]) is not None


@pytest.mark.parametrize(
    ("name", "kind", "text", "vision", "width"),
    [
        ("openai/clip-vit-base-patch32", "clip", {}, {}, 512),
        ("google/siglip-base-patch16-224", "siglip", {}, {}, None),
        ("google/siglip2-base-patch16-224", "siglip", {"vocab_size": 256_000}, {}, None),
        (
            "openai/clip-vit-large-patch14",
            "clip",
            {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
            {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "patch_size": 14,
            },
            768,
        ),
    ],
)
def test_weights_are_counted_in_the_architecture(name, kind, text, vision, width):
    from transformers import AutoConfig, AutoModel

    projection = {"projection_dim": width} if width else {}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **projection)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert sum(each.numel() for each in model.parameters()) == KNOWN_MODELS[name].num_weights


def test_every_known_model_has_its_facts():
    for name, model in KNOWN_MODELS.items():
        assert name == model.name
        assert model.dim > 0
        assert model.licence
        assert model.purpose
        assert bool(model.num_weights) == (name != "gare-mini")
        assert all(language == MANY or len(language) == 2 for language in model.languages)
    assert languages_of("gare-mini") == ("en",)
    assert languages_of("runs/x", encoder="clip", source="openai/clip-vit-base-patch32") == ("en",)
    reader = model_that_reads("sw")
    assert reader is not None
    assert MANY in reader.languages


@pytest.mark.parametrize(
    ("num_words", "is_cut"), [(1, False), (15, False), (16, False), (17, True), (400, True)]
)
def test_a_text_that_is_longer_than_the_model_reads(tiny_model, num_words, is_cut):
    assert tiny_model.encoder.max_words == 16
    texts, text = TextCache(tiny_model), " ".join(["dog"] * num_words)
    texts.get([text])
    assert texts.is_cut(text) is is_cut
    assert not texts.is_cut("a text that was not asked for")


def test_an_encoder_that_fills_every_text_says_nothing_of_its_length(tiny_model, monkeypatch):
    tokenize = tiny_model.encoder.tokenize

    def filled(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids_TW, mask_TW = tokenize([" ".join([*text.split(), *["pad"] * 16]) for text in texts])
        assert mask_TW.all()
        return token_ids_TW, mask_TW

    monkeypatch.setattr(tiny_model.encoder, "tokenize", filled)
    texts = TextCache(tiny_model)
    texts.get(["a dog"])
    assert not texts.is_cut("a dog")


def test_gare_mini_says_that_the_end_of_a_long_query_does_not_count():
    texts = TextCache(GARE.from_pretrained("gare-mini"))
    short, long = "a man in a suit gives a speech to an audience", "a dog runs on the beach " * 10
    texts.get([short, long])
    assert (texts.is_cut(short), texts.is_cut(long)) == (False, True)
    assert "longer than gare-mini reads" in length_notice("gare-mini")
